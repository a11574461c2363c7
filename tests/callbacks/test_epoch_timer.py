"""What is timed and what is waited for."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_mgpu.callbacks import EpochTimer, epoch_timer
from lightning_mgpu.models import LeNet
from lightning_mgpu.runs.devices import own_devices


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


def test_a_process_waits_for_its_own_devices_alone() -> None:
    """Waiting for the GPU of another process opens a context there: hundreds of MB, or an error if it is exclusive."""
    gpus = [torch.device("cuda", i) for i in range(2)]
    for num_processes, first, own in ((2, gpus[1], gpus[1:]), (1, gpus[0], gpus)):
        strategy = SimpleNamespace(root_device=first, parallel_devices=gpus, world_size=num_processes)
        assert own_devices(SimpleNamespace(strategy=strategy)) == own  # type: ignore[arg-type]
