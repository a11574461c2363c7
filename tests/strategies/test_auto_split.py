"""`split`: shares of the batch by hand, or by the devices' speed."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.strategies import ManualAllreduceStrategy, auto_split
from lightning_mgpu.strategies.auto_split import AutoSplit

CPU = torch.device("cpu")


class Clock(threading.local):
    """A clock for each thread, that stands still but for what a step says it takes: no machine is too busy for it."""

    seconds = 0.0


class Uneven(LightningModule):
    """Replica 1 takes four times as long for a sample as replica 0, by the clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1).double()
        self.clock = clock
        self.sizes: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        X, y = batch
        if self.clock is not None:
            self.clock.seconds += len(X) * (4 if self.trainer.strategy.team.index == 1 else 1)
        self.sizes.append([batch_idx, len(X)])
        return F.mse_loss(self.net(X)[:, 0], y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(module: Uneven, strategy: Any, devices: int) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(X, X.sum(1)), 20))
    return trainer


@pytest.mark.parametrize("split", [[3.0, 1.0], [0.1, 0.9], [1.0, 2.0]])
def test_shares_by_hand_do_not_change_the_training(split: list[float]) -> None:
    seed_everything(0, verbose=False)
    expected, found = Uneven(), Uneven()
    found.load_state_dict(expected.state_dict())
    fit(expected, "auto", 1)
    fit(found, ManualAllreduceStrategy(split=split), 2)
    torch.testing.assert_close(found.net.weight, expected.net.weight, rtol=1e-10, atol=0)
    assert {size for _, size in found.sizes} == {round(20 * share / sum(split)) for share in split}


def test_the_faster_device_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything(0, verbose=False)
    monkeypatch.setattr(auto_split, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    expected, found = Uneven(), Uneven(clock := Clock())
    found.load_state_dict(expected.state_dict())
    fit(expected, "auto", 1)
    trainer = fit(found, strategy := ManualAllreduceStrategy(split="auto"), 2)
    assert strategy.split == pytest.approx([0.8, 0.2])
    assert sorted(size for idx, size in found.sizes if idx == 0) == [10, 10]
    assert sorted(size for idx, size in found.sizes if idx == 9) == sorted(trainer.strategy._sizes(torch.empty(20)))
    torch.testing.assert_close(found.net.weight, expected.net.weight, rtol=1e-10, atol=0)


def test_first_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    split = AutoSplit(num_steps=3)
    for _ in range(2):
        split.seconds[0] = split.seconds[1] = 1e6
        assert split.next_shares([1.0, 1.0]) is None
    for _ in range(2):  # forward and backward
        split.timed(lambda i: None, [CPU, CPU])(0)
    split.timed(lambda i: [next(clock) for _ in range(5)], [CPU, CPU])(1)
    assert split.next_shares([1.0, 1.0]) is None
    assert split.next_shares([1.0, 1.0]) == pytest.approx([0.75, 0.25])
    assert split.next_shares([1.0, 1.0]) is None  # once


def test_batches_too_small_to_time_all_keep_even_shares() -> None:
    split = AutoSplit(num_steps=1)
    split.next_shares([1.0, 1.0])
    split.timed(lambda i: None, [CPU, CPU])(0)
    assert split.next_shares([1.0, 1.0]) is None
