"""One LightningDataModule per file; `batches.py`: global batches, `sources.py`: downloads."""

from lightning_mgpu.data.batches import batch_loader
from lightning_mgpu.data.fashion_mnist import FashionMNIST

__all__ = ["FashionMNIST", "batch_loader"]
