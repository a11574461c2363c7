"""What steps collect and return: on the first device, but on the CPU where that is where they have put it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.slow


class Output:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclass(slots=True)
class Slots:
    value: Tensor


KINDS = {
    "on the CPU": lambda Z: Z.cpu(),
    "both": lambda Z: (Z.cpu(), Z),
    "dict": lambda Z: {"cpu": Z.cpu(), "nested": (Z, Z.cpu())},
    "object": Output,
    "object on the CPU": lambda Z: Output(Z.cpu()),
    "slots on the CPU": lambda Z: Slots(Z.cpu()),
}


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in a list's item, or in what a step returns, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        value = list(value.values())
    elif is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, Output):
        value = [value.value]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def joined(items: list[Any]) -> list[Tensor]:
    """The items' first tensors put together, their second ones, and so on."""
    return [torch.cat(parts) for parts in zip(*(list(tensors(item)) for item in items))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for tensor, other in zip(found, expected):
        assert tensor.device == other.device
        torch.testing.assert_close(tensor.cpu(), other.cpu(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", ["training", "validation"])
@pytest.mark.parametrize("kind", KINDS)
def test_lists_that_steps_collect(Regression, assert_parity, kind, stage):
    """An epoch's hook puts their items together, which takes one device."""

    class Module(Regression):
        def on_train_epoch_start(self):
            self.collected, self.by_name = [], {"outputs": []}

        def step(self, batch):
            output = KINDS[kind](self.net(batch[0]).detach())
            self.collected.append(output)
            self.by_name["outputs"].append(output)

        def training_step(self, batch, batch_idx):
            if stage == "training":
                self.step(batch)
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            if stage == "validation":
                self.step(batch)

        def on_train_epoch_end(self):
            self.joined = joined(self.collected), joined(self.by_name["outputs"])

    one, *others = assert_parity(Module, val=stage == "validation")
    assert any(tensor.is_cpu for tensor in one.joined[0]) or "CPU" not in kind
    for other in others:
        for found, expected in zip(other.joined, one.joined):
            assert_same(found, expected)


@pytest.mark.parametrize("stage", ["train", "validation"])
@pytest.mark.parametrize("kind", ["on the CPU", "both", "dict", "slots on the CPU"])
def test_what_steps_return(Regression, assert_parity, kind, stage):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.returned = []

        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(batch), "output": KINDS[kind](self.net(batch[0]).detach())}

        def validation_step(self, batch, batch_idx):
            return {"output": KINDS[kind](self.net(batch[0]))}

    def keep(self, outputs, batch, batch_idx):
        self.returned.append(outputs["output"])

    setattr(Module, f"on_{stage}_batch_end", keep)
    one, *others = assert_parity(Module, val=stage == "validation")
    for other in others:
        assert_same(joined(other.returned), joined(one.returned))


def test_what_is_returned_for_every_sample(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.names, self.samples = [], []

        def validation_step(self, batch, batch_idx):
            X, y = batch
            return {
                "names": [f"{x[0]:.6f}" for x in X],
                "samples": [{"cpu": value.cpu(), "value": value} for value in y],
            }

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            self.names += outputs["names"]
            self.samples += outputs["samples"]

    one, *others = assert_parity(Module, val=True)
    for other in others:
        assert other.names == one.names
        for key in ("cpu", "value"):
            assert_same([sample[key] for sample in other.samples], [sample[key] for sample in one.samples])


def test_a_loss_on_the_cpu(Regression, assert_parity):
    """What is returned beside it is where the step has it."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(batch).cpu(), "targets": batch[1]}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert outputs["loss"].is_cpu
            torch.testing.assert_close(outputs["targets"], batch[1])

    assert_parity(Module)


def test_lengths_of_sequences(Regression, assert_parity):
    """Packing wants them on the CPU, so that is where `transfer_batch_to_device` leaves them."""

    class Module(Regression):
        def __init__(self):
            super().__init__(nn.RNN(2, 3, batch_first=True))

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            X, y = batch
            return X.unflatten(1, (3, 2)).to(device), y.to(device), 1 + torch.arange(len(X)) % 3

        def training_step(self, batch, batch_idx):
            X, y, lengths = batch
            assert lengths.numpy().max() <= 3
            packed = nn.utils.rnn.pack_padded_sequence(X, lengths, batch_first=True, enforce_sorted=False)
            _, hidden = self.net(packed)
            return (hidden[0] - y).square().mean()

    assert_parity(Module)


@pytest.mark.parametrize("in_place", [False, True])
def test_counters(Regression, assert_parity, in_place):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.sums, self.found = Counter(), []

        def training_step(self, batch, batch_idx):
            total = batch[1].sum()
            for key, value in {"device": total, "CPU": total.cpu()}.items():
                if in_place:
                    self.sums[key] += value
                else:
                    self.sums[key] = self.sums[key] + value
            return self.loss(batch)

        def on_train_epoch_end(self):
            self.found += [self.sums["device"].clone(), self.sums["CPU"].clone()]

    one, *others = assert_parity(Module)
    for other in others:
        assert_same(other.found, one.found)


@pytest.mark.parametrize("place", ["device", "CPU"])
def test_sets(Regression, assert_parity, place):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.sums, self.found = set(), []

        def training_step(self, batch, batch_idx):
            total = batch[1].sum()
            self.sums.add(total if place == "device" else total.cpu())
            return self.loss(batch)

        def on_train_epoch_end(self):
            self.found.append(sum(self.sums))
            self.sums.clear()

    one, *others = assert_parity(Module)
    for other in others:
        assert_same(other.found, one.found)
