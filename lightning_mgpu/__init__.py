"""Training on several devices in PyTorch Lightning, opened up to be read, swapped and measured.

Read in this order:

1. `models/`      the book's LeNet and ResNet-18 as LightningModules; they know nothing of devices
2. `data/`        Fashion-MNIST in global batches: the same ones under every strategy
3. `allreduce/`   ways to sum tensors over devices, the book's first
4. `strategies/`  the textbook's engine and `dp`, for Lightning's Trainer
5. `callbacks/`   run header, epoch times, learning curve, predictions
6. `runs/`        one run, one directory: checkpoints, resume, CSV and Weights & Biases, export
7. `cli/`         the LightningCLI that puts them together

The other directories and `book.py` can be deleted: nothing of these imports them. Each docstring
says what it does.
"""

import gc

__version__ = "0.1.0"

_collects = gc.isenabled()
# a quarter of the time that these imports take goes into looking for garbage: there is none
gc.disable()
try:
    import lightning_mgpu.strategies  # noqa: F401 (for Trainer(strategy="manual_allreduce"))
finally:
    if _collects:
        gc.enable()
