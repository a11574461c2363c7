"""Data-parallel training in PyTorch Lightning whose gradient synchronization is ordinary Python.

Read `models/`, `data/`, `allreduce/`, `strategies/`, `callbacks/`, `runs/`, `cli/`, in this order.
None of them imports `book.py` or the other directories, which you may delete.
"""

import importlib.util
import re
import sys

# importing torch takes seconds, and `--help` does not need it
if not re.search("lightning.mgpu.* (-h|--help|--version)$", " ".join(sys.orig_argv)):
    import lightning_mgpu.strategies  # noqa: F401 - for Trainer(strategy="manual_allreduce")

    if importlib.util.find_spec(f"{__name__}.exchanges"):  # can be deleted
        importlib.import_module(f"{__name__}.exchanges")

__version__ = "0.1.0"
