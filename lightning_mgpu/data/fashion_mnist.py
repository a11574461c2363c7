"""Fashion-MNIST (Xiao et al., 2017): 60,000 + 10,000 grey 28x28 images in ten classes of clothing.

python -m lightning_mgpu fit --data.batch_size=512 --data.augment=true --data.cutout=8
"""

import os
import warnings
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torchvision.datasets import FashionMNIST as FashionMNISTFiles
from torchvision.datasets.mnist import read_image_file, read_label_file

from lightning_mgpu.data.batches import BatchLoader, batch_loader
from lightning_mgpu.data.images import InMemoryImages
from lightning_mgpu.data.sources import ensure_fashion_mnist

MEAN, STD = 0.2860, 0.3530  # of the 60,000 training images, pixels in [0, 1]


class FashionMNIST(LightningDataModule):
    """Fashion-MNIST in global batches (X, y): float32 images (B, 1, 28, 28) and int64 labels (B,).

    Args:
        batch_size: Samples of a *global* batch, under every strategy and number of devices.
        root: Holds the files, or gets them, under `{root}/FashionMNIST/raw`. `~` works.
        source: Where missing files come from. `auto` tries `local` (under `root`, or the
            distribution's package `dataset-fashion-mnist`, if it is installed), `torchvision` (its
            download) and `package` (the same package through apt-get, without root). `synthetic`
            reads no file and trains on noise with a class pattern.
        val_size: How many of the 60,000 images are drawn for validation, by `seed`. With 0, the
            test set is the validation set.
        normalize: Subtract the training set's mean, divide by its deviation. The book does not.
        augment: Crop the training images at random after padding, and flip them horizontally.
        crop_padding: Pixels of that padding; 0 for flips alone.
        cutout: Side, in pixels, of a square that is cut out of every augmented image as well.
        seed: For validation split, order of batches, augmentation. The default is
            `seed_everything`'s.
        device_resident: Keep all images on the process's first device, so that a step transfers
            none.

    Raises:
        DataSourceError: When no source has the files (see `sources.py`).
        ValueError: For sizes that do not fit, and batches that processes cannot share.
    """

    classes = FashionMNISTFiles.classes

    def __init__(
        self,
        batch_size: int = 256,
        root: str = "~/.cache/lightning_mgpu",
        source: Literal["auto", "local", "torchvision", "package", "synthetic"] = "auto",
        val_size: int = 5000,
        normalize: bool = False,
        augment: bool = False,
        crop_padding: int = 2,
        cutout: int = 0,
        seed: int | None = None,
        device_resident: bool = False,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.root = root
        self.source = source
        self.val_size = val_size
        self.normalize = normalize
        self.augment = augment
        self.crop_padding = crop_padding
        self.cutout = cutout
        # seed_everything leaves the seed in this variable
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.device_resident = device_resident
        for name, least in {"batch_size": 1, "val_size": 0, "crop_padding": 0, "cutout": 0}.items():
            if (value := getattr(self, name)) < least:
                raise ValueError(f"data.{name}={value}: it must be at least {least}.")
        if cutout and not augment:
            raise ValueError(f"data.cutout={cutout} is an augmentation: add data.augment=true.")
        self.origin = ""  # where the files came from; `prepare_data` fills it in

    @property
    def validates_on_test_set(self) -> bool:
        return self.val_size == 0

    @property
    def summary(self) -> str:
        """For the run's header, after `setup`: `55,000 train, 5,000 val, 10,000 test; files ...`"""
        sizes = {"train": self.train_indices, "val": self.val_indices, "test": self.test_indices}
        counts = ", ".join(f"{len(indices):,} {stage}" for stage, indices in sizes.items())
        return f"{counts}; {self.origin}"

    def prepare_data(self) -> None:
        if self.source == "synthetic":
            if not self.origin:  # once, not again when `fit` goes on to `test`
                warnings.warn(
                    "data.source=synthetic: training on made-up images; no accuracy below means "
                    "anything."
                )
            self.origin = "SYNTHETIC images, not Fashion-MNIST"
        else:
            self.origin = ensure_fashion_mnist(self.root, self.source)

    def setup(self, stage: str) -> None:
        device = torch.device("cpu")
        if self.device_resident and self.trainer is not None:
            device = self.trainer.strategy.root_device
        images, labels = (tensor.to(device) for tensor in self._load(train=True))
        if self.val_size >= len(images):
            raise ValueError(
                f"data.val_size={self.val_size} leaves none of the {len(images)} images to train "
                "on."
            )
        test_images, test_labels = (tensor.to(device) for tensor in self._load(train=False))
        # must never change: else an old checkpoint would be validated on images it was trained on
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.seed))
        self.val_indices = order[: self.val_size].sort().values.to(device)
        self.train_indices = order[self.val_size :].sort().values.to(device)
        self.test_indices = torch.arange(len(test_images), device=device)
        # an overfitted batch has to stay the same: no augmentation
        overfits = self.trainer is not None and self.trainer.overfit_batches  # type: ignore[attr-defined]
        self.train_set = self._dataset(images, labels, augment=self.augment and not overfits)
        self.test_set = self._dataset(test_images, test_labels)
        self.val_set = self._dataset(images, labels)
        if self.validates_on_test_set:
            self.val_set, self.val_indices = self.test_set, self.test_indices

    def train_dataloader(self) -> BatchLoader:
        return self._loader(self.train_set, self.train_indices, shuffle=True)

    def val_dataloader(self) -> BatchLoader:
        return self._loader(self.val_set, self.val_indices)

    def test_dataloader(self) -> BatchLoader:
        return self._loader(self.test_set, self.test_indices)

    predict_dataloader = test_dataloader

    def _loader(
        self, images: InMemoryImages, indices: Tensor, shuffle: bool = False
    ) -> BatchLoader:
        return batch_loader(images, self.batch_size, self.trainer, shuffle, self.seed, indices)

    def _load(self, train: bool) -> tuple[Tensor, Tensor]:
        if self.source == "synthetic":
            return synthetic_fashion_mnist(60_000 if train else 10_000, seed=int(train))
        raw = Path(self.root).expanduser() / "FashionMNIST" / "raw"
        prefix = "train" if train else "t10k"
        images = read_image_file(str(raw / f"{prefix}-images-idx3-ubyte"))
        labels = read_label_file(str(raw / f"{prefix}-labels-idx1-ubyte"))
        return images[:, None], labels  # (N, 1, 28, 28) uint8, (N,) int64

    def _dataset(self, images: Tensor, labels: Tensor, augment: bool = False) -> InMemoryImages:
        mean, std = (MEAN, STD) if self.normalize else (0.0, 1.0)
        padding, cutout = (self.crop_padding, self.cutout) if augment else (0, 0)
        return InMemoryImages(
            images, labels, mean, std, padding, flip=augment, cutout=cutout, seed=self.seed
        )


def synthetic_fashion_mnist(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """uint8 noise (N, 1, 28, 28) with a faint stripe pattern for each class, and labels (N,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_samples) % 10
    columns, frequencies = torch.arange(28), 1 + torch.arange(10)[:, None]
    stripes = (columns * frequencies // 10 % 2 * 96).to(torch.uint8)  # (10, 28)
    noise = torch.randint(0, 128, (num_samples, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return noise + stripes[labels][:, None, None, :], labels
