"""The chapter: a step is the same on any number of devices; the Trainer finds the same weights."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lightning_mgpu import book
from lightning_mgpu.models import LeNet
from lightning_mgpu.strategies import ManualAllreduceStrategy

CPU = torch.device("cpu")
SHAPES = [param.shape for param in book.init_params()]


def params():
    """Parameters in float64, so far from zero that each gets a gradient that counts."""
    generator = torch.Generator().manual_seed(1)
    return [0.1 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def batch(num_samples):
    X = torch.randn(num_samples, 1, 28, 28, dtype=torch.float64)
    return X, torch.arange(num_samples) % 10


@pytest.fixture
def tiny(make_data, tmp_path, monkeypatch):
    """The chapter on 503 images; on GPUs if there are any, two replicas on one if there is one."""
    monkeypatch.chdir(tmp_path)  # for the picture
    monkeypatch.setattr(book, "FashionMNIST", lambda size, **kw: make_data(batch_size=size, **kw))


@pytest.mark.parametrize("num_samples", [7, 2])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 16])
def test_a_step_is_gradient_descent_on_the_whole_batch(num_devices, num_samples):
    """All replicas hold the same bits. Shards differ in size; some are empty."""
    X, y = batch(num_samples)
    initial = book.get_params(params(), CPU)
    gradients = torch.autograd.grad(F.cross_entropy(book.lenet(X, initial), y), initial)
    replicas = [book.get_params(params(), CPU) for _ in range(num_devices)]
    book.train_batch(X, y, replicas, [CPU] * num_devices, lr=0.5)
    for first, *others in zip(*replicas):
        assert all(torch.equal(first, other) for other in others)
        assert len({parameter.data_ptr() for parameter in (first, *others)}) == num_devices
    for found, before, gradient in zip(replicas[0], initial, gradients):
        torch.testing.assert_close(found, before - 0.5 * gradient, rtol=1e-10, atol=1e-13)


def test_the_trainer_finds_the_same_weights(tiny, make_data, make_trainer, monkeypatch):
    """`manual_allreduce` is the chapter: 3 epochs in the same order, the last batch of 55."""
    model = LeNet(lr=0.2).double()
    for parameter, value in zip(model.net.parameters(), params()):
        parameter.data.copy_(value.T if value.ndim == 2 else value)  # as `nn.Linear` keeps it
    strategy = ManualAllreduceStrategy()
    make_trainer(strategy=strategy, max_epochs=3, precision="64-true").fit(
        model, make_data(val_size=0)
    )

    lenet = book.lenet
    monkeypatch.setattr(book, "lenet", lambda X, params: lenet(X.double(), params))
    monkeypatch.setattr(book, "init_params", params)
    for replica in book.train(2, 64, 0.2, 3):
        for found, before, parameter in zip(replica, params(), model.net.parameters()):
            expected = parameter.T if parameter.ndim == 2 else parameter
            torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-10, atol=1e-13)
            assert not torch.allclose(found.cpu(), before, rtol=1e-4)


def test_every_sample_is_evaluated():
    X, _ = batch(9)
    predicted = book.lenet(X, params()).argmax(1)
    for wrong in range(9):  # all labels are right but one
        labels = torch.where(torch.arange(9) == wrong, 9 - predicted, predicted)
        batches = zip(X.split([7, 2]), labels.split([7, 2]))
        assert book.evaluate_accuracy(batches, params()) == pytest.approx(8 / 9)


@pytest.mark.gpu
def test_the_command(tiny, capsys):
    book.main(["--devices=2", "--num_epochs=2", "--batch_size=32"])
    first, *epochs, last = capsys.readouterr().out.splitlines()
    assert first == "16 batches of 32 per epoch; curve: book.png"
    assert [line.partition(":")[0] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    losses = re.findall(r": train loss (\S+), test acc 0\.\d\d\d\n", "\n".join([*epochs, last]))
    # of a sample, by logits near zero
    assert [float(loss) for loss in losses] == [pytest.approx(math.log(10), 0.05)] * 2
    devices = re.escape(str(((book.gpus() or [CPU]) * 2)[:2]))
    line = rf"test acc: 0\.\d\d, \d+\.\d sec/epoch on {devices}"
    assert re.fullmatch(line, last) and Path("book.png").read_bytes().startswith(b"\x89PNG")
