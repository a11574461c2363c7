"""A batch cut into shards, and what replicas return put together again.

| file         | what is in it                                          |
| ------------ | ------------------------------------------------------ |
| `shards.py`  | `split_batch` of the book                              |
| `gather.py`  | its inverse                                            |
| `nesting.py` | what both look into: lists, tuples, dicts, dataclasses |
"""
