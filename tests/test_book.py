"""The chapter: a step is the same on any number of devices; the Trainer finds the same weights."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mgpu import book
from lightning_mgpu.devices import gpus
from lightning_mgpu.models import LeNet
from tests.conftest import run_devices

CPU = torch.device("cpu")
SHAPES = [param.shape for param in book.init_params()]


def params() -> list[Tensor]:
    """Parameters in float64, so far from zero that each gets a gradient that counts."""
    generator = torch.Generator().manual_seed(1)
    return [0.1 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def batch(num_samples: int) -> tuple[Tensor, Tensor]:
    X = torch.randn(num_samples, 1, 28, 28, dtype=torch.float64)
    return X, torch.arange(num_samples) % 10


@pytest.fixture
def tiny(make_data: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chapter on 503 images, and on the CPU, or on simulated devices."""
    monkeypatch.setattr(book, "FashionMNIST", lambda size, **kw: make_data(batch_size=size, **kw))
    found = [device for device in run_devices(2) if device.type != "cpu"]
    monkeypatch.setattr(book, "gpus", lambda: found)


# shards of different sizes; on many devices empty ones
@pytest.mark.parametrize("num_samples", [7, 2])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 16])
def test_a_step_is_gradient_descent_on_the_whole_batch(num_devices: int, num_samples: int) -> None:
    """All replicas hold the same bits."""
    X, y = batch(num_samples)
    initial = book.get_params(params(), CPU)
    gradients = torch.autograd.grad(F.cross_entropy(book.lenet(X, initial), y), initial)
    original, devices = params(), [CPU] * num_devices
    replicas = [book.get_params(original, device) for device in devices]
    book.train_batch(X, y, replicas, devices, lr=0.5)
    for first, *others in zip(*replicas):
        assert all(torch.equal(first, other) for other in others)
        assert len({parameter.data_ptr() for parameter in (first, *others)}) == num_devices
    for found, before, gradient, given in zip(replicas[0], initial, gradients, original):
        torch.testing.assert_close(found, before - 0.5 * gradient, rtol=1e-10, atol=1e-13)
        assert torch.equal(given, before), "a replica has storage of its own"


def test_the_trainer_finds_the_same_weights(
    tiny: None, make_data: Callable, make_trainer: Callable, tmp_path: Path, monkeypatch: Any
) -> None:
    """The same images, in the same order, for 3 epochs; the last batch has 55."""
    model = LeNet(lr=0.2).double()
    for parameter, value in zip(model.net.parameters(), params()):
        # `nn.Linear` keeps its weight transposed
        parameter.data.copy_(value.T if value.ndim == 2 else value)
    trainer = make_trainer(max_epochs=3, precision="64-true")
    trainer.fit(model, make_data(val_size=0, seed=0))
    assert trainer.global_step == 3 * 8

    lenet = book.lenet
    monkeypatch.setattr(book, "lenet", lambda X, params: lenet(X.double(), params))
    monkeypatch.setattr(book, "init_params", params)
    monkeypatch.setattr(book, "FashionMNIST", lambda *_, **kw: make_data(**kw, seed=0))
    for replica in book.train(2, 64, 0.2, 3, overlap=1, curve=str(tmp_path / "book.png")):
        for found, before, parameter in zip(replica, params(), model.net.parameters()):
            expected = parameter.T if parameter.ndim == 2 else parameter
            torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-10, atol=1e-13)
            assert not torch.allclose(found.cpu(), before, rtol=1e-4)


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_steps_in_flight(overlap: int, tiny: None, tmp_path: Path, monkeypatch: Any) -> None:
    """The host waits for the end of step t - overlap before it begins step t."""
    ends: list[int] = []
    in_flight: list[int] = []

    def mark_end(devices: list[torch.device]) -> list[Any]:
        ends.append(step := len(ends))
        in_flight.append(step)
        assert len(in_flight) <= overlap
        return [SimpleNamespace(synchronize=lambda: in_flight.remove(step))]

    monkeypatch.setattr(book, "mark_end", mark_end)
    book.train(16, 100, 0.2, 1, overlap, str(tmp_path / "book.png"))
    assert len(ends) == 6 and in_flight == ends[-overlap:]


def test_every_sample_is_evaluated() -> None:
    batches, replicas = [batch(7), batch(2)], [params() for _ in range(3)]
    predicted = torch.cat([book.lenet(X, params()).argmax(1) for X, _ in batches])
    for wrong in range(9):  # all labels are right but one
        labels = torch.where(torch.arange(9) == wrong, 9 - predicted, predicted).split([7, 2])
        labelled = [(X, y) for (X, _), y in zip(batches, labels)]
        assert book.evaluate_accuracy(labelled, replicas, [CPU] * 3) == pytest.approx(8 / 9)


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="needs a GPU")
def test_on_gpus(tiny: None, monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    """Two replicas, on one GPU if there is only one."""
    monkeypatch.setattr(book, "gpus", gpus)
    book.main(["--devices=2", "--num_epochs=1", f"--curve={tmp_path / 'book.png'}"])
    assert f"sec/epoch on [{gpus()[0]!r}, " in capsys.readouterr().out


def test_the_command(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = tmp_path / "book.png"
    book.main(["--devices=2", "--num_epochs=2", "--batch_size=32", f"--curve={curve}"])
    *epochs, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in epochs] == ["epoch 1", "epoch 2"]
    line = r"test acc: 0\.\d\d, \d+\.\d sec/epoch on " + re.escape(str(run_devices(2)))
    assert re.fullmatch(line, last) and curve.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="2"):
        book.main(["--devices=0"])
    assert "--devices=0: it must be at least 1" in capsys.readouterr().err
