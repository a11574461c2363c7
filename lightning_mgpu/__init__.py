"""Training on several devices in PyTorch Lightning, opened up so that it can be read, swapped and measured.

Read in this order:

1. `models/`      the book's LeNet and ResNet-18 as LightningModules; they know nothing of devices
2. `data/`        Fashion-MNIST in global batches: the same ones under every strategy
3. `callbacks/`   run header, epoch times, learning curve, predictions
4. `tracking/`    Weights & Biases, offline unless somebody is logged in
5. `cli.py`       the LightningCLI that puts them together
"""

__version__ = "0.1.0"
