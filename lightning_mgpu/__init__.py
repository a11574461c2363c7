"""Training on several devices in PyTorch Lightning, opened up to be read, swapped and measured.

Read `models/`, `data/`, `allreduce/`, `strategies/`, `callbacks/`, `runs/`, `cli/`, in this order.
Nothing in these imports the other directories or `book.py`, which can be deleted.
"""

import importlib.util
import re
import sys

# our own `--help` needs no torch, which takes seconds
started = re.search(__name__.replace("_", "[-_]") + " ", " ".join(sys.orig_argv))
if not (started and {"-h", "--help", "--version"} & {*sys.argv}):
    import lightning_mgpu.strategies  # noqa: F401 - for Trainer(strategy="manual_allreduce")

    if importlib.util.find_spec(f"{__name__}.exchanges"):  # this directory can be deleted
        importlib.import_module(f"{__name__}.exchanges")

__version__ = "0.1.0"
