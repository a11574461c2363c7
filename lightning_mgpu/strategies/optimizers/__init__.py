"""Every replica updates itself, as in the book.

| file                  | what is in it                                               |
| --------------------- | ----------------------------------------------------------- |
| `optimizers.py`       | copies of the user's optimizers make the same update        |
| `optimizer_copies.py` | the copies                                                  |
| `lockstep.py`         | manual optimization: replicas meet in `backward` and `step` |
| `per_replica.py`      | the module and optimizers that code finds there, by replica |
"""
