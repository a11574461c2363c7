"""How gradients travel between the replicas of several processes.

A *bucket* (DDP's word) is parameters whose gradients travel together (buckets.py). A *route* is a
generator, one per bucket: it yields what this process sends, gets what has come, and returns the
bucket's sums (sums.py). The *courier* carries the messages of all routes side by side (courier.py).
The *dispatcher* starts the buckets in their order, each as soon as all its gradients are there,
which is while the backward pass still runs (dispatcher.py).

    process 0: | backward of the last layers | ... of the first layers |
    bucket 0                                 | message    | its sums   |
    bucket 1                                              | message    | its sums |

An exchange of your own is another route (`exchanges/`).
"""
