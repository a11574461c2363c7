"""Histograms: what they count, and at which steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger

from lightning_mgpu.callbacks import Watch
from lightning_mgpu.models import LeNet
from lightning_mgpu.runs.watch import NUM_BINS, histogram


def test_histogram_counts_finite_values() -> None:
    counts, edges = histogram(torch.tensor([0.0, 1.0, 1.0, float("inf"), float("nan")]))
    assert counts[0] == 1 and counts[-1] == 2 and sum(counts) == 3
    assert (len(counts), len(edges)) == (NUM_BINS, NUM_BINS + 1) and (edges[0], edges[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("tensor", "total", "middle"),
    [
        (torch.full((3,), 2.0), 3, 2.0),
        (torch.tensor([float("nan")]), 0, 0.0),
        (torch.empty(0), 0, 0.0),
        (torch.tensor(2.0, dtype=torch.bfloat16), 1, 2.0),
    ],
)
def test_histogram_of_one_value_or_none(tensor: torch.Tensor, total: int, middle: float) -> None:
    counts, edges = histogram(tensor)
    assert sum(counts) == total and (edges[0] + edges[-1]) / 2 == middle


class Recorder(WandbLogger):
    """Keeps what it is told, and knows no W&B."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step or 0, dict(metrics)))

    name = version = save_dir = None
    log_hyperparams = log_graph = finalize = after_save_checkpoint = lambda *args, **kwargs: None


@pytest.mark.parametrize(("log", "kinds"), [("gradients", 1), ("parameters", 1), ("all", 2)])
def test_every_few_steps(log: Any, kinds: int, make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    logger = Recorder()
    make_trainer(callbacks=[Watch(log, every=3)], logger=logger, max_epochs=1).fit(LeNet(), make_data())
    rows = [(step, row) for step, row in logger.rows if any("/net." in name for name in row)]
    assert [step for step, _ in rows] == [0, 3, 6]
    assert [len(row) for _, row in rows] == [kinds * 8] * 3  # four layers of weight and bias
    assert {name.split("/")[0] for name in rows[0][1]} == ({"gradients", "parameters"} if kinds == 2 else {log})


def test_without_wandb_nothing_is_computed(
    make_data: Callable, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_mgpu.runs.watch.histogram", lambda tensor: pytest.fail("computed"))
    make_trainer(callbacks=[Watch(every=1)]).fit(LeNet(), make_data())
