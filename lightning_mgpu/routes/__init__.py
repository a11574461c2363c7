"""How gradients travel between the replicas of several processes.

A *bucket* (DDP's word) is parameters whose gradients travel together (buckets.py). A *route* is a
generator, one per bucket: it yields what this process sends, gets what has come, and returns the
bucket's sums (sums.py). The *courier* carries the messages of all routes side by side (courier.py).
The *dispatcher* starts the buckets in their order, each as soon as all its gradients are there,
which is while the backward pass still runs (dispatcher.py).

    process 0: | backward pass: last layers | ... | first layers | meeting | sums 0 | sums 1 |
    bucket 0                                | message ...        |
    bucket 1                                                     | message ...      |

`strategies/__init__.py` has the whole way of a batch. An exchange of one's own is another route
(`exchanges/`).
"""
