"""Fashion-MNIST (Xiao et al., 2017): 60,000 + 10,000 gray 28x28 images in ten classes of clothing.

python -m lightning_mgpu fit --data.batch_size=512 --data.augment=true
"""

import os
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST as FashionMNISTFiles
from torchvision.datasets.mnist import read_image_file, read_label_file

from lightning_mgpu.data.batches import batch_loader
from lightning_mgpu.data.images import InMemoryImages
from lightning_mgpu.data.sources import ensure_fashion_mnist

MEAN, STD = 0.2860, 0.3530  # of the 60,000 training images, pixels in [0, 1]


class FashionMNIST(LightningDataModule):
    """Fashion-MNIST in global batches (X, y): float32 images (B, 1, 28, 28) and int64 labels (B,).

    Args:
        batch_size: Global batch size, independent of strategy and number of devices.
        root: Directory of the files, in `{root}/FashionMNIST/raw`; `~` is expanded.
        source: `auto` finds or downloads the files (`sources.py`), `synthetic`: noise with stripes.
        val_size: Number of training images used for validation; 0 validates on the test set.
        normalize: Standardize by mean and deviation of the training set. The book does not.
        augment: Randomly crop the training images after padding, and flip them horizontally.
        crop_padding: Padding of random crops, in pixels; with 0, images are only flipped.
        seed: Seed of validation split, batches and augmentation. Default: `seed_everything`.
        device_resident: Keep all images on the first device of the process: no transfers per step.
    """

    classes = FashionMNISTFiles.classes

    def __init__(
        self,
        batch_size: int = 256,
        root: str = "~/.cache/lightning_mgpu",
        source: Literal["auto", "synthetic"] = "auto",
        val_size: int = 5000,
        normalize: bool = False,
        augment: bool = False,
        crop_padding: int = 2,
        seed: int | None = None,
        device_resident: bool = False,
    ) -> None:
        super().__init__()
        self.batch_size, self.root, self.source, self.val_size = batch_size, root, source, val_size
        self.normalize, self.augment, self.device_resident = normalize, augment, device_resident
        self.crop_padding = crop_padding
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        if min(val_size, crop_padding) < 0:
            raise ValueError(f"{val_size=}, {crop_padding=}: must be non-negative.")
        self.validates_on_test_set = val_size == 0
        self.origin = "SYNTHETIC images, not Fashion-MNIST"  # or the source of the files

    def prepare_data(self) -> None:
        if self.source == "synthetic":
            warnings.warn("data.source=synthetic: random images; the accuracy is meaningless.")
        else:
            self.origin = ensure_fashion_mnist(self.root)

    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer
        device = trainer.strategy.root_device if self.device_resident and trainer else "cpu"
        (images, labels), test = self._load(train=True), self._load(train=False)
        if self.val_size >= len(images):
            raise ValueError(f"data.val_size={self.val_size}: must be less than {len(images)}")
        # must never change: else old checkpoints would be validated on their training images
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.seed))
        val, train = (part.sort().values for part in order.tensor_split([self.val_size]))
        scale = (MEAN, STD) if self.normalize else (0.0, 1.0)
        self.train_set, self.val_set, self.test_set = (
            InMemoryImages(X.to(device), y.to(device), *scale, seed=self.seed)
            for X, y in ((images[train], labels[train]), (images[val], labels[val]), test)
        )
        if self.validates_on_test_set:
            self.val_set = self.test_set
        if self.augment and not (trainer and trainer.overfit_batches):  # fixed images
            self.train_set.crop_padding = self.crop_padding
        sizes = (len(images) for images in (self.train_set, self.val_set, self.test_set))
        self.summary = "{:,} train, {:,} val, {:,} test; {}".format(*sizes, self.origin)

    def train_dataloader(self) -> DataLoader:
        return batch_loader(self.train_set, self.batch_size, self.trainer, True, self.seed)

    def val_dataloader(self) -> DataLoader:
        return batch_loader(self.val_set, self.batch_size, self.trainer)

    def test_dataloader(self) -> DataLoader:
        return batch_loader(self.test_set, self.batch_size, self.trainer)

    predict_dataloader = test_dataloader

    def _load(self, train: bool) -> tuple[Tensor, Tensor]:
        """Images (N, 1, 28, 28), uint8, and labels (N,)."""
        if self.source == "synthetic":
            return synthetic_fashion_mnist(60_000 if train else 10_000, seed=int(train))
        prefix = f"{Path(self.root).expanduser()}/FashionMNIST/raw/{'train' if train else 't10k'}"
        labels = read_label_file(f"{prefix}-labels-idx1-ubyte")
        return read_image_file(f"{prefix}-images-idx3-ubyte")[:, None], labels


def synthetic_fashion_mnist(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """uint8 noise (N, 1, 28, 28) with a faint stripe pattern for each class, and labels (N,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_samples) % 10
    stripes = torch.arange(28) * torch.arange(1, 11)[:, None] // 10 % 2 * 96  # (10, 28)
    noise = torch.randint(0, 128, (num_samples, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return noise + stripes.to(torch.uint8)[labels][:, None, None, :], labels
