"""Replicas side by side, a thread each.

| file               | what is in it                                                      |
| ------------------ | ------------------------------------------------------------------ |
| `team.py`          | the threads, and how they meet                                     |
| `generators.py`    | states of the random generators they draw from                     |
| `device_module.py` | `torch.cuda` for GPUs                                              |
| `patches.py`       | functions of torch and Lightning that are others while a step runs |
| `forward_mode.py`  | forward-mode AD, one replica at a time                             |
"""
