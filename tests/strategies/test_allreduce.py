"""Functions that exchange gradients, written by users: what trains, and what is refused in one line."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.strategies import ManualAllreduceStrategy

ROOT = Path(__file__).parents[2]


def books(data: list[Tensor]) -> None:
    """d2l.ai's `allreduce`, as it is today."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


class Scaled(nn.Module):
    """Has a 0-d parameter, as CLIP's temperature is one."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, X: Tensor) -> Tensor:
        return self.net(X) * self.scale.exp()


@pytest.fixture
def engine() -> str:
    return "manual_allreduce"


@pytest.fixture(params=[False, True], ids=["automatic", "manual"])
def make(request: pytest.FixtureRequest, Regression: Any) -> Callable[[], LightningModule]:
    class Manual(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    return Manual if request.param else Regression


@pytest.mark.parametrize("settings", [{}, {"bucket_mb": 1}, {"gradient_as_bucket_view": True}], ids=str)
def test_the_books_trains_0d_parameters(
    settings: dict[str, Any], Regression: Any, assert_parity: Callable[..., Any]
) -> None:
    assert_parity(
        lambda: Regression(Scaled()), strategy=lambda: ManualAllreduceStrategy(books, **settings), own_updates=True
    )


def test_one_that_stops_exchanging(make: Any, train: Callable[..., LightningModule]) -> None:
    """Seen in the epoch after, at the latest."""

    class Forgets:
        num_calls = 0

        def __call__(self, tensors: list[Tensor]) -> None:
            self.num_calls += 1
            if self.num_calls < 50:
                textbook_allreduce(tensors)

    with pytest.raises(ValueError, match=r"^allreduce .*Forgets.* left device 1 \(.*\) with another sum than device 0"):
        train(make, 2, strategy=ManualAllreduceStrategy(Forgets()), check=False, max_epochs=8)


def test_a_strategy_that_exchanges_nothing(make: Any, train: Callable[..., LightningModule]) -> None:
    class LocalSGD(ManualAllreduceStrategy):
        def reduce_gradients(self) -> None:
            pass

    with pytest.raises(MisconfigurationException, match=r"^LocalSGD\.reduce_gradients has added nothing up: call self"):
        train(make, 2, strategy=LocalSGD(), check=False)


@pytest.mark.parametrize("bucket_mb", [0, 1])
def test_one_that_empties_its_list(bucket_mb: float, Regression: Any, assert_parity: Callable[..., Any]) -> None:
    def popping(data: list[Tensor]) -> None:
        everyone = list(data)
        while len(data) > 1:
            data[0].add_(data.pop().to(data[0].device))
        for tensor in everyone[1:]:
            tensor.copy_(data[0])

    assert_parity(Regression, strategy=lambda: ManualAllreduceStrategy(popping, bucket_mb=bucket_mb))


ALLREDUCE = """
    def good(tensors):
        total = sum(tensor.to(tensors[0].device) for tensor in tensors)
        for tensor in tensors:
            tensor.copy_(total)

    def book(data):
        for i in range(1, len(data)):
            data[0][:] += data[i].to(data[0].device)
        for i in range(1, len(data)):
            data[i] = data[0].to(data[i].device)
"""
FLAGS = [
    "--data.source=synthetic",
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=3",
    "--trainer.limit_val_batches=2",
    "--trainer.limit_test_batches=2",
    "--data.batch_size=8",
]


def cli(tmp_path: Path, *args: str) -> subprocess.CompletedProcess:
    (tmp_path / "exchange_by_hand.py").write_text(textwrap.dedent(ALLREDUCE))
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": paths, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "lightning_mgpu", "fit", *FLAGS, *args]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_by_name_and_by_class_path(tmp_path: Path) -> None:
    result = cli(tmp_path, "--trainer.strategy=manual_allreduce")
    assert result.returncode == 0, result.stderr
    (tmp_path / "own.yaml").write_text(
        "trainer:\n  strategy:\n    class_path: lightning_mgpu.strategies.ManualAllreduceStrategy\n"
        "    init_args:\n      allreduce: exchange_by_hand.good\n      bucket_mb: 1\n      split: [0.75, 0.25]\n"
    )
    result = cli(tmp_path, "--config=own.yaml")
    assert result.returncode == 0, result.stderr
    assert "test acc" in result.stdout


@pytest.mark.slow
def test_the_books_first_allreduce_is_refused_in_one_line(tmp_path: Path) -> None:
    strategy = "--trainer.strategy=lightning_mgpu.strategies.ManualAllreduceStrategy"
    result = cli(tmp_path, strategy, "--trainer.strategy.allreduce=exchange_by_hand.book")
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert "book" in line
