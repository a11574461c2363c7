"""A run resumed from the middle of an epoch takes the same trajectory, to the bit, as one that never stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.optim import SGD

from lightning_mgpu.models import LeNet

NUM_BATCHES = 7  # 402 samples in batches of 64


class SaveAt(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("step", [3, NUM_BATCHES + 3, NUM_BATCHES])
def test_resumed_trajectory_is_bit_identical(
    make_data: Callable, make_trainer: Callable, tmp_path: Path, step: int
) -> None:
    def fit(callbacks: list[Callback], ckpt_path: Path | None = None) -> tuple[dict[str, torch.Tensor], Any]:
        seed_everything(1, verbose=False)
        model = LeNet(optimizer=lambda params: SGD(params, lr=0.2, momentum=0.9))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        trainer = make_trainer(max_epochs=3, callbacks=callbacks)
        trainer.fit(model, make_data(augment=True), ckpt_path=ckpt_path, weights_only=True)
        return model.state_dict(), trainer

    whole, trainer = fit([SaveAt(step, tmp_path / "middle.ckpt")])
    saved = torch.load(tmp_path / "middle.ckpt", weights_only=True)["state_dict"]
    assert not all(torch.equal(whole[name], saved[name]) for name in saved)
    resumed, resumed_trainer = fit([], tmp_path / "middle.ckpt")
    assert trainer.global_step == resumed_trainer.global_step == 3 * NUM_BATCHES
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for name in ("val_loss", "val_acc", "train_loss", "train_acc"):  # of the last epoch
        assert trainer.callback_metrics[name] == resumed_trainer.callback_metrics[name]
