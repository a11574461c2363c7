"""What a step logs with `self.log`: over replicas equal to one device, every step and epoch."""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import classification as tc

pytestmark = pytest.mark.slow

NUM_CLASSES = 4


@pytest.mark.parametrize(
    "when", [{"on_step": True, "on_epoch": False}, {"on_epoch": True}, {"on_step": True, "on_epoch": True}]
)
def test_means(when: dict[str, bool], assert_same: Callable[..., None]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log(f"{stage}_tensor", X.mean(), prog_bar=True, **when)
        module.log(f"{stage}_float", X.mean().item(), **when)
        module.log(f"{stage}_number", 3, **when)
        module.log(f"{stage}_tenth", 0.1, **when)
        module.log(f"{stage}_one", X.mean().reshape(1), **when)
        module.log(f"{stage}_given", X.mean(), batch_size=len(X), **when)
        module.log(f"{stage}_constant", X.mean(), batch_size=7, **when)
        module.log_dict({f"{stage}_a": X.mean(), f"{stage}_b": X.std() * 0 + batch_idx}, **when)

    assert_same(step)


@pytest.mark.parametrize("names", [("sum", "max", "min"), (torch.sum, torch.max, torch.min), (sum, max, min)])
def test_other_reductions(names: tuple[Any, Any, Any], assert_same: Callable[..., None]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        values = {"sum": (y == 0).sum(), "max": X.max(), "min": X.min()}
        for (name, value), reduce_fx in zip(values.items(), names):
            module.log(f"{stage}_{name}", value, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
            module.log(f"{stage}_{name}_number", value.item(), False, True, False, True, reduce_fx)

    assert_same(step)


def test_unknown_reductions_are_lightnings_affair(written: Callable[..., list[Any]]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log("median", X.median(), reduce_fx=torch.median)

    with pytest.raises(Exception, match="reduce_fx=") as expected:
        written(1, step, lambda: None)
    with pytest.raises(type(expected.value), match="reduce_fx="):
        written(2, step, lambda: None)


def test_values_changed_in_place_after_logging(assert_same: Callable[..., None]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        value, row = X.mean(), X.mean().reshape(1)
        module.log(f"{stage}_value", value, on_epoch=True)
        module.log(f"{stage}_row", row, on_epoch=True)
        scores = module.probabilities(X).detach()
        module.metric.update(scores, y)
        module.log(f"{stage}_metric", module.metric, on_epoch=True)
        value += 1
        row += 1
        scores.zero_()

    assert_same(step, lambda: tc.MulticlassAccuracy(NUM_CLASSES))


def test_same_key_in_several_hooks(assert_same: Callable[..., None]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log("loss", X.mean(), on_step=stage == "train", on_epoch=True)

    assert_same(step, at_end=lambda module, stage: module.log(f"{stage}_end", 1.5))


def test_logged_by_some_replicas_only(assert_same: Callable[..., None]) -> None:
    """One device, too, logs such a value only for the batches that have it."""

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        if (rows := X[y == 0]).numel():
            module.log(f"{stage}_rare", rows.mean(), batch_size=len(rows), on_epoch=True)

    assert_same(step)


def test_several_dataloaders(assert_same: Callable[..., None], written: Callable[..., list[Any]]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log(f"{stage}_each", X.mean(), on_epoch=True)

    assert_same(step, num_loaders=2)
    assert any("dataloader_idx_1" in name for _, row in written(2, step, lambda: None, num_loaders=2) for name in row)


def test_a_single_sample_is_logged_at_once(Regression: Any, train: Callable, make_loader: Callable) -> None:
    """One replica has the whole batch, nothing has to be put together: a step may look at what it has logged."""

    class Module(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("index", float(batch_idx), on_step=False, on_epoch=True)
            assert self.trainer._results["training_step.index"].value == sum(range(batch_idx + 1))  # type: ignore[index]
            return super().training_step(batch, batch_idx)

    train(Module, 2, loader=make_loader(1, 3), max_epochs=1)


class LogsFor(nn.Module):
    """Whatever keeps the module's `log`: a partial, a dict, an object."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.function, self.partial = module.log, partial(module.log, on_step=True, on_epoch=True)
        self.by_name = {"log": module.log}


@pytest.mark.parametrize("hook", ["__init__", "on_train_start"])
def test_logs_that_are_kept(Regression: Any, train: Callable, hook: str) -> None:
    """Nobody looks `self.log` up in the step."""

    class Module(Regression):
        def __init__(self) -> None:
            super().__init__()
            if hook == "__init__":
                self.keep()

        def keep(self) -> None:
            vars(self)["helper"] = LogsFor(self)
            self.my_log = partial(self.log, on_epoch=True)

        def on_train_start(self) -> None:
            if hook == "on_train_start":
                self.keep()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            super().log("super", loss, on_epoch=True)
            LightningModule.log(self, "of_class", loss)
            self.my_log("mine", loss)
            self.helper.function("helper", loss)
            self.helper.partial("partial", loss)
            self.helper.by_name["log"]("by_name", loss, on_epoch=True)
            return loss

    one, *others = (dict(train(Module, k).trainer.callback_metrics) for k in (1, 2, 3))
    assert len(one) == 6 + 2 * 4
    for other in others:
        torch.testing.assert_close(other, one, rtol=1e-6, atol=0)


DECORATED = """
import sys
from functools import wraps
import torch
from lightning.pytorch import LightningModule, Trainer
log, names = LightningModule.log, []
@wraps(log)
def decorated(self, name, *args, **kwargs):
    names.append(name)
    return log(self, name, *args, **kwargs)
LightningModule.log = decorated

import lightning_mgpu.strategies
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        self.log("value", batch.mean(), on_epoch=True)
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.arange(9.0)[:, None], 4))
print(names.count("value"), float(trainer.callback_metrics["value_epoch"]))
"""


def test_a_log_somebody_has_decorated(engine: str) -> None:
    """Before this package was imported; it runs in every replica, and what it calls is recorded."""
    command = [sys.executable, "-W", "ignore", "-c", DECORATED, engine]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert output.stdout.splitlines()[-1:] == ["5 4.0"], output.stderr


def test_a_log_set_on_the_module(Regression: Any, train: Callable) -> None:
    class Module(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.log = partial(self.log, on_step=True, on_epoch=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", loss := self.loss(batch))
            return loss

    one, *others = (train(Module, k) for k in (1, 2, 3))
    for other in others:
        logged, expected = (dict(module.trainer.callback_metrics) for module in (other, one))
        torch.testing.assert_close(logged, expected, rtol=1e-6, atol=0)
        assert isinstance(other.log, partial) and "loss_epoch" in logged


def test_a_log_of_ones_own(Regression: Any, train: Callable, make_loader: Callable) -> None:
    """It runs in every replica, and calls Lightning's."""

    class Module(Regression):
        def log(self, name: str, value: Any, *, prefix: str = "own", **kwargs: Any) -> None:
            super().log(f"{prefix}/{name}", value * 2, **kwargs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.log("loss", loss, prefix="other", on_step=False, on_epoch=True)
            self.log_dict({"a": loss, "b": loss + 1}, on_step=False, on_epoch=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("end", 1.0)

    one, *others = (dict(train(Module, k).trainer.callback_metrics) for k in (1, 2, 3))
    assert set(one) == {"own/loss", "other/loss", "own/a", "own/b", "own/end"}
    for other in others:
        assert other.keys() == one.keys()
        assert all(math.isclose(other[name], one[name], rel_tol=1e-6) for name in one)


def test_where_lightning_logs_nothing(trainer_on: Any) -> None:
    """It says so in the step, which may go on."""

    class Module(LightningModule):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            with pytest.raises(MisconfigurationException, match="result collection is not registered"):
                self.log("x", 1.0)
            return batch

    [made] = trainer_on(2).predict(Module(), DataLoader(torch.arange(4), 4))  # type: ignore[arg-type]
    assert made.tolist() == [0, 1, 2, 3]
