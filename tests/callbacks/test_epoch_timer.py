"""What is timed and what is waited for; samples are counted where somebody can tell a batch's size."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mgpu.callbacks import EpochTimer, epoch_timer
from lightning_mgpu.models import LeNet


def test_timer_leaves_validation_out(
    make_data: Callable, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Steps(LeNet):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            now[0] += 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            now[0] += 100
            return super().validation_step(batch, batch_idx)

    monkeypatch.setattr(epoch_timer, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    timer = EpochTimer()
    trainer = make_trainer(max_epochs=2, callbacks=[timer], val_check_interval=3)  # in the middle of the epoch too
    trainer.fit(Steps(), make_data())
    assert timer.seconds == [7.0, 7.0] and timer.seconds_per_epoch == 7.0
    assert float(trainer.callback_metrics["epoch_seconds"]) == 7.0
    assert float(trainer.callback_metrics["samples_per_sec"]) == pytest.approx(402 / 7)
    assert time.perf_counter() != now[0]


class Graph:
    """A batch of a class of its own, as graphs are: no tensor, and no collection."""

    def __init__(self, X: list[Tensor]) -> None:
        self.X = torch.stack(X)


@pytest.mark.parametrize(("collate", "expected"), [(Graph, {}), (torch.stack, {"samples_per_sec": 6 / 2})])
def test_timer_takes_any_batch(
    collate: Callable, expected: dict[str, float], make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(getattr(batch, "X", batch)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    ticks = iter((0.0, 2.0))
    monkeypatch.setattr(epoch_timer, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    trainer = make_trainer(callbacks=[EpochTimer()])
    trainer.fit(Net(), DataLoader(torch.zeros(6, 4), 2, collate_fn=collate))  # type: ignore[arg-type]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {"epoch_seconds": 2.0, **expected}


def test_a_process_waits_for_its_own_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the GPU of another process opens a context there: hundreds of MB, or an error if it is exclusive."""
    gpus = [torch.device("cuda", i) for i in range(2)]
    waited: list[Any] = []
    monkeypatch.setattr(epoch_timer, "synchronize", waited.append)
    for strategy in (
        SimpleNamespace(root_device=gpus[1], parallel_devices=gpus, world_size=2),  # ddp's second process
        SimpleNamespace(root_device=gpus[0], parallel_devices=gpus, world_size=1),
        SimpleNamespace(root_device=gpus[0]),
    ):
        EpochTimer().on_train_epoch_start(SimpleNamespace(strategy=strategy), None)  # type: ignore[arg-type]
    assert waited == [gpus[1:], gpus, gpus[:1]]
