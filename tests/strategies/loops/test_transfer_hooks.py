"""Hooks that change a batch on its way to the device, of the module or of the data module."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def hooks_of(base: type, is_random: bool) -> type:
    class Hooked(base):  # type: ignore[misc]
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return [batch[0].to(device) + 1, batch[1].to(device)]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            noise = torch.randn_like(batch[0]) if is_random else batch[0].std(0)
            return [batch[0] + noise, batch[1]]

    return Hooked


@pytest.fixture
def Data(loader: Any) -> Any:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return loader()

        val_dataloader = train_dataloader

    return Data


@pytest.mark.parametrize("is_random", [False, True])
def test_transfer_hooks(
    trainer_on: Any, Regression: Any, Data: Any, loader: Any, assert_fits_alike: Any, is_random: bool
) -> None:
    assert_fits_alike(trainer_on, hooks_of(Regression, is_random), loader)
    assert_fits_alike(trainer_on, Regression, hooks_of(Data, is_random))
