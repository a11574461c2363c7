"""What is shown of an epoch is of this epoch."""

from collections.abc import Callable

import pytest

from lightning_mgpu.callbacks import EpochLines, LearningCurve
from lightning_mgpu.models import LeNet


def test_values_are_shown_in_the_epoch_they_are_of(
    make_data: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture
) -> None:
    curve = LearningCurve()
    callbacks = [EpochLines(), curve]
    trainer = make_trainer(max_epochs=3, callbacks=callbacks, enable_progress_bar=True, check_val_every_n_epoch=2)
    trainer.fit(LeNet(), make_data())
    assert ["val_acc" in line for line in capsys.readouterr().out.splitlines()] == [False, True, False]
    assert [epoch for epoch, _ in curve.points["val_acc"]] == [2] and len(curve.points["train_acc"]) == 3
