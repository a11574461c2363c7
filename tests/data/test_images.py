"""Whole batches are converted and augmented exactly as sample by sample."""

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import Normalize, ToTensor

from lightning_mgpu.data.fashion_mnist import MEAN, STD
from lightning_mgpu.data.images import InMemoryImages, augment, cut_out


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (40, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def crop_and_flip(image: Tensor, draw: Tensor, padding: int) -> Tensor:
    """The naive version: one image (C, H, W), one step after the other."""
    C, H, W = image.shape
    padded = torch.zeros(C, H + 2 * padding, W + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + H, padding : padding + W] = image
    top, left = (int(d * (2 * padding + 1)) for d in draw[:2])
    window = padded[:, top : top + H, left : left + W]
    return window.flip(2) if draw[2] < 0.5 else window


def with_a_hole(image: Tensor, draw: Tensor, size: int) -> Tensor:
    _, H, W = image.shape
    top, left = int(draw[0] * H) - size // 2, int(draw[1] * W) - size // 2
    image = image.clone()
    image[:, max(0, top) : top + size, max(0, left) : left + size] = 0
    return image


def test_every_byte_becomes_the_float_of_torchvision(images: Tensor) -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    X, y = InMemoryImages(every, torch.tensor([7]))[0, torch.tensor([0])]
    assert torch.equal(X[0], ToTensor()(Image.fromarray(every[0, 0].numpy())))
    assert X.dtype == torch.float32 and y.tolist() == [7]
    X, _ = InMemoryImages(images, torch.zeros(40), MEAN, STD)[0, torch.arange(40)]
    assert torch.equal(X, Normalize([MEAN], [STD])(images / 255))


@pytest.mark.parametrize("channels", [1, 3])
def test_augmenting_a_batch_equals_sample_by_sample(images: Tensor, channels: int) -> None:
    X, draws = images.expand(-1, channels, -1, -1).clone(), torch.rand(40, 3)
    X[:, -1] //= 2  # channels differ
    found = augment(X, draws, padding=2, flip=True)
    assert torch.equal(found, torch.stack([crop_and_flip(x, draw, 2) for x, draw in zip(X, draws)]))


def test_cutting_out_of_a_batch_equals_sample_by_sample() -> None:
    draws = torch.cat([torch.rand(198, 2), torch.tensor([[0.0, 0.0], [1 - 2**-24, 0.0]])])  # two corners
    for H, W, size in ((28, 20, 7), (6, 6, 1), (6, 6, 20)):
        X = torch.rand(200, 2, H, W) + 0.5
        wanted = torch.stack([with_a_hole(x, draw, size) for x, draw in zip(X, draws)])
        assert torch.equal(cut_out(X, draws, size), wanted) and (wanted == 0).any((1, 2, 3)).all()


def test_augmentation_depends_on_seed_epoch_and_sample_alone(images: Tensor) -> None:
    def batch(seed: int = 1, epoch: int = 5, samples: slice = slice(40), cutout: int = 8) -> Tensor:
        options = {"mean": MEAN, "std": STD, "crop_padding": 2, "flip": True, "cutout": cutout, "seed": seed}
        return InMemoryImages(images, torch.zeros(40), **options)[epoch, torch.arange(40)[samples]][0]

    whole = batch()
    assert torch.equal(batch(samples=slice(3, 40, 4)), whole[3::4])  # whatever the batch
    assert not torch.equal(batch(epoch=6), whole) and not torch.equal(batch(seed=2), whole)
    hole = whole != batch(cutout=0)  # what is cut out is the mean
    assert (whole[hole] == 0).all() and hole.any((1, 2, 3)).all()
