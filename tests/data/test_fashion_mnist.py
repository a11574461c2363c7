"""The data module on a tiny dataset in the real format; batches are augmented as single samples."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchvision.datasets import FashionMNIST as FashionMNISTFiles
from torchvision.transforms import Normalize

from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.data.fashion_mnist import MEAN, STD
from lightning_mgpu.data.images import InMemoryImages, augment, cut_out


def test_serves_what_torchvision_reads(root: Path, make_data: Callable) -> None:
    theirs = FashionMNISTFiles(root, train=False)
    data = make_data(augment=True, crop_padding=1, cutout=5)  # in training alone
    assert (data.train_set.flip, data.train_set.crop_padding, data.train_set.cutout) == (True, 1, 5)
    assert not (data.val_set.flip or data.val_set.crop_padding or data.val_set.cutout)
    X, y = map(torch.cat, zip(*data.test_dataloader()))
    assert X.dtype == torch.float32 and torch.equal(X, theirs.data[:, None] / 255)
    assert y.dtype == torch.int64 and torch.equal(y, theirs.targets)


def test_validation_is_split_off_by_the_seed_and_the_test_set_never_mixed_in(
    root: Path, make_data: Callable
) -> None:
    data, again, other = make_data(seed=3), make_data(seed=3), make_data(seed=4)
    assert len(data.val_indices) == 101 and len(data.train_indices) == 402
    all_indices = torch.cat([data.val_indices, data.train_indices])
    assert torch.equal(all_indices.sort().values, torch.arange(503))
    assert torch.equal(data.val_indices, again.val_indices)
    assert not torch.equal(data.val_indices, other.val_indices)
    test_images = {image.numpy().tobytes() for image in FashionMNISTFiles(root, train=False).data}
    splits = ((data.train_set, data.train_indices), (data.val_set, data.val_indices))
    for dataset, indices in splits:
        assert not test_images & {dataset.images[i].numpy().tobytes() for i in indices}


def test_seed_is_seed_everythings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert FashionMNIST().seed == 17 and FashionMNIST(seed=2).seed == 2


def test_synthetic_data_are_loud() -> None:
    data = FashionMNIST(source="synthetic", val_size=0)
    with pytest.warns(UserWarning, match="made-up images; no accuracy below means anything"):
        data.prepare_data()
    assert "SYNTHETIC" in data.origin
    data.setup("fit")
    assert (len(data.train_indices), len(data.test_indices)) == (60_000, 10_000)


@pytest.fixture
def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (40, 1, 28, 28), dtype=torch.uint8, generator=generator)


def crop_and_flip(image: Tensor, uniforms: Tensor, padding: int) -> Tensor:
    """The naive version: one image (C, H, W), one step after the other."""
    C, H, W = image.shape
    padded = torch.zeros(C, H + 2 * padding, W + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + H, padding : padding + W] = image
    top, left = (int(number * (2 * padding + 1)) for number in uniforms[:2])
    window = padded[:, top : top + H, left : left + W]
    return window.flip(2) if uniforms[2] < 0.5 else window


def test_images_are_normalised_as_by_torchvision(images: Tensor) -> None:
    X, _ = InMemoryImages(images, torch.zeros(40), MEAN, STD)[0, torch.arange(40)]
    assert torch.equal(X, Normalize([MEAN], [STD])(images / 255))


@pytest.mark.parametrize("channels", [1, 3])
def test_augmenting_a_batch_equals_sample_by_sample(images: Tensor, channels: int) -> None:
    X, uniforms = images.expand(-1, channels, -1, -1).clone(), torch.rand(40, 3)
    X[:, -1] //= 2  # channels differ
    one_by_one = [crop_and_flip(x, numbers, 2) for x, numbers in zip(X, uniforms)]
    assert torch.equal(augment(X, uniforms, padding=2, flip=True), torch.stack(one_by_one))


def test_a_square_is_cut_out_around_its_centre() -> None:
    # centres (1, 2) and (0, 3)
    X = cut_out(torch.ones(2, 1, 3, 4), torch.tensor([[0.5, 0.5], [0.0, 0.9]]), size=2)
    assert X[0, 0].int().tolist() == [[1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]
    assert X[1, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_augmentation_depends_on_seed_epoch_and_sample_alone(images: Tensor) -> None:
    def batch(seed: int = 1, epoch: int = 5, samples: slice = slice(40), cutout: int = 8) -> Tensor:
        dataset = InMemoryImages(
            images, torch.zeros(40), MEAN, STD, 2, flip=True, cutout=cutout, seed=seed
        )
        X, _ = dataset[epoch, torch.arange(40)[samples]]
        return X

    whole = batch()
    assert torch.equal(batch(samples=slice(3, 40, 4)), whole[3::4])  # whatever the batch
    assert not torch.equal(batch(epoch=6), whole) and not torch.equal(batch(seed=2), whole)
    hole = whole != batch(cutout=0)  # what is cut out is the mean
    assert (whole[hole] == 0).all() and hole.any((1, 2, 3)).all()
    assert int(hole.sum((1, 2, 3)).max()) == 8 * 8
