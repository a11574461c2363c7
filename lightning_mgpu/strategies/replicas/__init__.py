"""A module and its copies on other devices, kept alike.

| file            | what is in it                                                                |
| --------------- | ---------------------------------------------------------------------------- |
| `get_params.py` | `get_params` of the book: a copy of a module on a device                     |
| `replicas.py`   | the replicas: what is given to them, what is taken from them                 |
| `attributes.py` | what hooks and steps keep on the module, beside weights                      |
| `twins.py`      | the replica's own in the place of layers, methods, tensors of the original   |
| `elsewhere.py`  | copies of what is on another device than the replica                         |
| `values.py`     | what is in lists, dicts and objects, as far as a replica needs its own of it |
| `versions.py`   | whether a tensor was changed                                                 |
"""
