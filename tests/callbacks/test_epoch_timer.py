"""Batches of any kind are timed, and counted where somebody can tell their size."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mgpu.callbacks import EpochTimer, epoch_timer


class Graph:
    """A batch of a class of its own, as graphs are: no tensor, and no collection."""

    def __init__(self, X: Tensor) -> None:
        self.X = X


def pair(X: list[Tensor]) -> list[Tensor]:
    return [torch.stack(X), torch.zeros(3)]


@pytest.mark.parametrize(("collate", "expected"), [(lambda X: Graph(torch.stack(X)), None), (pair, 6 / 2)])
def test_timer_takes_any_batch(
    collate: Callable, expected: float | None, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch.X if isinstance(batch, Graph) else batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    warned: list[str] = []
    monkeypatch.setattr("lightning.pytorch.utilities.data.warning_cache.warn", warned.append)
    ticks = iter((0.0, 2.0))
    monkeypatch.setattr(epoch_timer, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    trainer = make_trainer(callbacks=[EpochTimer()])
    trainer.fit(Net(), DataLoader(torch.zeros(6, 4), 2, collate_fn=collate))  # type: ignore[arg-type]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {"epoch_seconds": 2.0, **({"samples_per_sec": expected} if expected else {})}
    assert warned == []
