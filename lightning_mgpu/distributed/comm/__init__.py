"""How processes sum gradients in buckets, while the backward pass is still running.

A *bucket*, as in DDP, contains the parameters whose gradients are sent together (buckets.py). A
*message schedule* is a generator, one per bucket: it yields the messages of this process, receives
the bytes of all processes, and returns the bucket's sums (schedules.py). The *transport* sends the
messages of all schedules concurrently (transport.py). The *reducer* plays the role of DDP's
Reducer: it starts each bucket, in order, as soon as its gradients are ready (reducer.py).

    process 0: | backward: last layers | ... | first layers | control message | sums 0 | sums 1 |
    bucket 0                           | message ...        |
    bucket 1                                                | message ...     |

`strategies/__init__.py` follows a batch through these files. An exchange is a custom message
schedule (`exchanges/`).
"""
