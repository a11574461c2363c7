"""Layers that have to know of the other replicas.

| file                | what is in it                                                   |
| ------------------- | --------------------------------------------------------------- |
| `sync_batchnorm.py` | BatchNorm over the whole batch                                  |
| `embeddings.py`     | `Embedding(max_norm=...)`, which edits its weights in `forward` |
| `own_forward.py`    | what these two put in the place of a layer's `forward`          |
"""
