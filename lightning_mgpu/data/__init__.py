"""LightningDataModules: one dataset a file, the batch contract in `batches.py`, the files' origin in `sources.py`."""

from lightning_mgpu.data.batches import batch_loader
from lightning_mgpu.data.fashion_mnist import FashionMNIST

__all__ = ["FashionMNIST", "batch_loader"]
