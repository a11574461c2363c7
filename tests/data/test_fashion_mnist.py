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
    batches = list(make_data().test_dataloader())
    assert torch.equal(torch.cat([X for X, _ in batches]), theirs.data[:, None] / 255)
    assert torch.equal(torch.cat([y for _, y in batches]), theirs.targets)
    X, y = batches[0]
    assert X.dtype == torch.float32 and y.dtype == torch.int64 and X.shape[1:] == (1, 28, 28)


def test_validation_is_split_off_by_the_seed_and_the_test_set_never_mixed_in(root: Path, make_data: Callable) -> None:
    data, again, other = make_data(seed=3), make_data(seed=3), make_data(seed=4)
    assert len(data.val_indices) == 101 and len(data.train_indices) == 402
    assert torch.equal(torch.cat([data.val_indices, data.train_indices]).sort().values, torch.arange(503))
    assert torch.equal(data.val_indices, again.val_indices) and not torch.equal(data.val_indices, other.val_indices)
    test_images = {image.numpy().tobytes() for image in FashionMNISTFiles(root, train=False).data}
    for dataset, indices in ((data.train_set, data.train_indices), (data.val_set, data.val_indices)):
        assert not test_images & {dataset.images[i].numpy().tobytes() for i in indices}


def test_val_size_0_validates_on_the_test_set(make_data: Callable) -> None:
    data = make_data(val_size=0)
    assert data.validates_on_test_set and len(data.train_indices) == 503
    for (a, _), (b, _) in zip(data.val_dataloader(), data.test_dataloader(), strict=True):
        assert torch.equal(a, b)


def test_seed_is_seed_everythings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert FashionMNIST().seed == 17 and FashionMNIST(seed=2).seed == 2


def seen(make_data: Callable, make_trainer: Callable, **limits: float) -> list[list[int]]:
    """The labels of the training batches of two epochs."""
    labels: list[list[int]] = []

    class Recording(LeNet):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            labels.append(batch[1].tolist())
            return super().training_step(batch, batch_idx)

    make_trainer(max_epochs=2, **limits).fit(Recording(), make_data())
    return labels


def test_limits_and_overfitting(make_data: Callable, make_trainer: Callable) -> None:
    whole = seen(make_data, make_trainer)
    assert [len(labels) for labels in whole] == ([64] * 6 + [18]) * 2 and whole[:7] != whole[7:]
    over = seen(make_data, make_trainer, overfit_batches=2)
    assert len(over) == 4 and over[:2] == over[2:]
    data = make_data(augment=True, cutout=8)
    make_trainer(overfit_batches=1).fit(LeNet(), data)
    assert not (data.train_set.flip or data.train_set.cutout or data.train_set.crop_padding)  # images as they are


def test_synthetic_data_are_loud() -> None:
    data = FashionMNIST(source="synthetic", val_size=0)
    with pytest.warns(UserWarning, match="made-up images; no accuracy below means anything"):
        data.prepare_data()
    assert "SYNTHETIC" in data.origin
    data.setup("fit")
    assert (len(data.train_indices), len(data.test_indices)) == (60_000, 10_000)
