"""How the gradients of a bucket are exchanged between processes.

A *bucket* (DDP's word) is parameters whose gradients are sent together (buckets.py). A *message
schedule* is a generator, one per bucket: it yields what this process sends, gets what it has
received, and returns the bucket's sums (schedules.py). The *transport* carries the messages of all
schedules side by side (transport.py). The *reducer* starts the buckets in their order, each as soon
as all its gradients are ready, which is while the backward pass still runs (reducer.py).

    process 0: | backward: last layers | ... | first layers | control message | sums 0 | sums 1 |
    bucket 0                           | message ...        |
    bucket 1                                                | message ...     |

`strategies/__init__.py` follows a batch through all of it. An exchange is a different message
schedule (`exchanges/`).
"""
