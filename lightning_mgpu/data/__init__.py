"""One LightningDataModule per file; `batches.py` has the batch contract, `sources.py` the files."""

from lightning_mgpu.data.batches import batch_loader
from lightning_mgpu.data.fashion_mnist import FashionMNIST

__all__ = ["FashionMNIST", "batch_loader"]
