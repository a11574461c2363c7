"""What is timed and what is waited for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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


def test_a_process_waits_for_its_own_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the GPU of another process opens a context there: hundreds of MB, or an error if it is exclusive."""
    gpus = [torch.device("cuda", i) for i in range(2)]
    waited: list[Any] = []
    monkeypatch.setattr(epoch_timer, "synchronize", waited.append)
    for strategy in (
        SimpleNamespace(root_device=gpus[1], parallel_devices=gpus, world_size=2),  # ddp's second process
        SimpleNamespace(root_device=gpus[0], parallel_devices=gpus, world_size=1),
    ):
        EpochTimer().on_train_epoch_start(SimpleNamespace(strategy=strategy), None)  # type: ignore[arg-type]
    assert waited == [gpus[1:], gpus]
