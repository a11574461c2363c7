"""The data. Every argument of `MyData` is an option: `--data.batch_size=256`."""

import torch
from lightning.pytorch import LightningDataModule
from lightning_mgpu.data import batch_loader
from torch.utils.data import DataLoader, TensorDataset


class MyData(LightningDataModule):
    """Noise images (1, 28, 28) with one of ten rows brighter: the row is the class.

    Replace `make_images`. `batch_loader` supports any map-style dataset.

    Args:
        batch_size: Global batch size, over all devices.
        num_train: Number of training images.
    """

    def __init__(self, batch_size: int = 256, num_train: int = 10000) -> None:
        super().__init__()
        self.batch_size, self.num_train = batch_size, num_train
        self.classes = [f"row {row}" for row in range(10)]  # names, for pictures and tables
        self.summary = f"{num_train:,} train, 1,000 val, 1,000 test; synthetic"  # for the header

    def setup(self, stage: str) -> None:
        self.train_set = make_images(self.num_train, seed=0)
        self.val_set = make_images(1000, seed=1)
        self.test_set = make_images(1000, seed=2)

    def train_dataloader(self) -> DataLoader:
        return batch_loader(self.train_set, self.batch_size, self.trainer, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return batch_loader(self.val_set, self.batch_size, self.trainer)

    def test_dataloader(self) -> DataLoader:
        return batch_loader(self.test_set, self.batch_size, self.trainer)

    def predict_dataloader(self) -> DataLoader:
        return self.test_dataloader()


def make_images(num: int, seed: int) -> TensorDataset:
    """X (num, 1, 28, 28) and y (num,), identical in every process."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (num,), generator=generator)
    X = torch.randn(num, 1, 28, 28, generator=generator)
    X[torch.arange(num), 0, 2 * y + 4] += 1  # a row of 28 pixels per image
    return TensorDataset(X, y)
