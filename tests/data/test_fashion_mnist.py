"""The data module on a tiny dataset in the real format: split, limits, workers, and a stand-in that says what it is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchvision.datasets import FashionMNIST as FashionMNISTFiles

from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet


def test_serves_what_torchvision_reads(root: Path, make_data: Callable) -> None:
    theirs = FashionMNISTFiles(root, train=False)
    data = make_data(augment=True, crop_padding=1, cutout=5)  # in training alone
    assert (data.train_set.flip, data.train_set.crop_padding, data.train_set.cutout) == (True, 1, 5)
    assert not (data.val_set.flip or data.val_set.crop_padding or data.val_set.cutout)
    X, y = map(torch.cat, zip(*data.test_dataloader()))
    assert X.dtype == torch.float32 and torch.equal(X, theirs.data[:, None] / 255)
    assert y.dtype == torch.int64 and torch.equal(y, theirs.targets)


def test_validation_is_split_off_by_the_seed_and_the_test_set_never_mixed_in(root: Path, make_data: Callable) -> None:
    data, again, other = make_data(seed=3), make_data(seed=3), make_data(seed=4)
    assert len(data.val_indices) == 101 and len(data.train_indices) == 402
    assert torch.equal(torch.cat([data.val_indices, data.train_indices]).sort().values, torch.arange(503))
    assert torch.equal(data.val_indices, again.val_indices) and not torch.equal(data.val_indices, other.val_indices)
    test_images = {image.numpy().tobytes() for image in FashionMNISTFiles(root, train=False).data}
    for dataset, indices in ((data.train_set, data.train_indices), (data.val_set, data.val_indices)):
        assert not test_images & {dataset.images[i].numpy().tobytes() for i in indices}


def test_seed_is_seed_everythings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert FashionMNIST().seed == 17 and FashionMNIST(seed=2).seed == 2


def test_overfitting_is_on_the_same_images_as_they_are(make_data: Callable, make_trainer: Callable) -> None:
    labels: list[list[int]] = []

    class Recording(LeNet):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            labels.append(batch[1].tolist())
            return super().training_step(batch, batch_idx)

    data = make_data(augment=True, cutout=8)
    make_trainer(max_epochs=2, overfit_batches=2).fit(Recording(), data)
    assert len(labels) == 4 and labels[:2] == labels[2:]
    assert not (data.train_set.flip or data.train_set.cutout or data.train_set.crop_padding)


def test_synthetic_data_are_loud() -> None:
    data = FashionMNIST(source="synthetic", val_size=0)
    with pytest.warns(UserWarning, match="made-up images; no accuracy below means anything"):
        data.prepare_data()
    assert "SYNTHETIC" in data.origin
    data.setup("fit")
    assert (len(data.train_indices), len(data.test_indices)) == (60_000, 10_000)
