"""`training_step` returns a weight, and the strategy may ignore it."""

import pytest

from lightning_mgpu.callbacks import IgnoredWeight
from lightning_mgpu.testing.probe import Data, Masked, Probe


@pytest.mark.parametrize(
    ("make", "strategy", "devices", "num_warnings"),
    [
        (Masked, "auto", 1, 1),
        (Masked, "manual_allreduce", 1, 0),
        (Masked, "manual_allreduce", 2, 0),
        (Masked, "dp", 2, 0),
        (Probe, "auto", 1, 0),
    ],
)
def test_one_warning(make_trainer, recwarn, make, strategy, devices, num_warnings):
    trainer = make_trainer(
        strategy=strategy, devices=devices, max_epochs=2, callbacks=[IgnoredWeight()]
    )
    trainer.fit(make(), datamodule=Data())
    said = [str(each.message) for each in recwarn if "ignores" in str(each.message)]
    assert len(said) == num_warnings
    assert all(
        "SingleDeviceStrategy ignores: --trainer.strategy=manual_allreduce" in each for each in said
    )
