"""Training on several devices in PyTorch Lightning, opened up to be read, swapped and measured.

Read in this order:

1. `models/`      the book's LeNet and ResNet-18 as LightningModules; they know nothing of devices
2. `data/`        Fashion-MNIST in global batches: the same ones under every strategy
3. `allreduce/`   ways to sum tensors over devices, the book's first
4. `strategies/`  the textbook's engine and `dp`, for Lightning's Trainer
5. `callbacks/`   what people look at: header, a line per epoch, learning curve, predictions
6. `runs/`        one run, one directory: checkpoints, resume, CSV and Weights & Biases
7. `cli/`         the LightningCLI that puts them together

The other directories and `book.py` can be deleted, because nothing in these imports them.
"""

import importlib
import importlib.util
import os
import tempfile

try:
    tempfile.TemporaryFile(dir=os.path.expanduser("~")).close()  # root may write anywhere, it says
except OSError:
    # matplotlib, which the next import brings, and W&B would complain in twenty lines
    for _name in ("MPLCONFIGDIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        os.environ.setdefault(_name, tempfile.mkdtemp())

import lightning_mgpu.strategies  # noqa: F401 - for Trainer(strategy="manual_allreduce")

if importlib.util.find_spec(f"{__name__}.exchanges"):  # this directory can be deleted
    importlib.import_module(f"{__name__}.exchanges")

__version__ = "0.1.0"
