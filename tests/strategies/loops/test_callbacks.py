"""Callbacks see batches, outputs and hooks of one device, and what they change reaches all replicas."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

HOOKS = [name for name in dir(Callback) if name.startswith(("on_", "setup", "teardown"))]


class Watch(Callback):
    """Keeps every batch and what the step returned."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _keep(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        self.seen.append(copy.deepcopy((outputs, batch)))

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _keep


@pytest.fixture
def Talkative(Regression: Any) -> Any:
    class Talkative(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            X, y = batch
            scores = self.net(X)
            extras = {
                "scores": scores.detach(), "tokens": X.reshape(-1), "count": (y > 0).sum(),
                "correct": int((y > 0).sum()), "mean": float(y.mean()), "names": [f"{x:.2f}" for x in y.tolist()],
                "nested": {"pair": (y, X)}, "none": None,
            }  # fmt: skip
            return {"loss": F.mse_loss(scores[:, 0], y), **extras}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {key: value for key, value in self.training_step(batch, batch_idx).items() if key != "loss"}

    return Talkative


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("make", ["Regression", "Talkative"], indirect=True)
def test_callbacks_see_batches_and_outputs_of_one_device(
    trainer_on: Any, loader: Any, fitted: Any, assert_equal: Any, make: type
) -> None:
    watches = {k: Watch() for k in (1, 2, 3)}
    for k, watch in watches.items():
        fitted(trainer_on, k, make, loader, watch)
    assert len(watches[1].seen) == 2 + 2 * 6
    for k in (2, 3):
        assert_equal(watches[k].seen, watches[1].seen)


@pytest.mark.parametrize("how", ["in_place", "replaced", "key"])
def test_callbacks_change_the_batch(
    trainer_on: Any, Regression: Any, collated: Any, fitted: Any, assert_equal: Any, how: str
) -> None:
    class Shift(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
            if how == "in_place":
                batch["X"].add_(1)
            elif how == "replaced":
                batch["X"] = batch["X"] + 1
            else:
                batch["shift"] = torch.ones_like(batch["X"][:, :1])

    def unpack(batch: Any) -> tuple[Tensor, Tensor]:
        return batch["X"] + batch.get("shift", 0), batch["y"]

    make = collated(lambda X, y: {"X": X, "y": y})
    plain = fitted(trainer_on, 1, lambda: Regression(unpack), make)[0]
    expected = fitted(trainer_on, 1, lambda: Regression(unpack), make, Shift())[0]
    assert not torch.equal(plain["net.0.weight"], expected["net.0.weight"])
    for k in (2, 3):
        assert_equal(fitted(trainer_on, k, lambda: Regression(unpack), make, Shift())[0], expected)


def test_modes_and_attributes_set_by_callbacks_reach_all_replicas(
    trainer_on: Any, Regression: Any, loader: Any, fitted: Any
) -> None:
    class Freeze(Callback):
        def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
            module.net[1].eval()
            module.flag = trainer.current_epoch

    class Checked(Regression):
        seen: list[tuple[bool, bool, int]] = []  # noqa: RUF012

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append((self.net[1].training, self.net[0].training, self.flag))  # type: ignore[arg-type]
            return super().training_step(batch, batch_idx)

    Checked.seen.clear()
    fitted(trainer_on, 2, Checked, loader, Freeze())
    assert Checked.seen == [(False, True, 0)] * 6 + [(False, True, 1)] * 6


def test_hooks_are_called_in_the_order_of_one_device(trainer_on: Any, Regression: Any, loader: Any) -> None:
    def record(k: int) -> list[str]:
        calls: list[str] = []

        def hook(name: str, who: str) -> Callable[..., None]:
            return lambda self, *args, **kwargs: calls.append(f"{who}.{name}")

        Recording = type("Recording", (Callback,), {name: hook(name, "callback") for name in HOOKS})
        own = [name for name in HOOKS if hasattr(LightningModule, name) and name not in ("setup", "teardown")]
        module_type = type("Recorded", (Regression,), {name: hook(name, "module") for name in own})
        trainer = trainer_on(k, callbacks=[Recording()], accumulate_grad_batches=2)
        module = module_type()
        trainer.fit(module, loader(), loader())
        for run in (trainer.validate, trainer.test, trainer.predict):
            run(module, loader())
        return calls

    expected = record(1)
    assert "callback.on_before_zero_grad" in expected
    assert record(2) == expected
