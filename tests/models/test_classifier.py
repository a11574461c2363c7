"""What is logged equals a computation by hand; every optimizer and scheduler steps as it should; checkpoints reload."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from lightning_mgpu.models import LeNet, ResNet18
from lightning_mgpu.models.classifier import MeanLoss


class Rates(Callback):
    """The learning rate every step is made with."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def by_hand(model: Callable, data: Any, stage: str) -> tuple[float, float]:
    """Mean loss and accuracy over a stage's samples, all at once."""
    indices = getattr(data, f"{stage}_indices")
    X, y = getattr(data, f"{stage}_set")[0, indices]
    with torch.no_grad():
        logits = model(X)
    return F.cross_entropy(logits.double(), y).item(), (logits.argmax(1) == y).double().mean().item()


def spread_out(model: LeNet) -> LeNet:
    """Weights so large that samples, and so batches, differ in loss."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_epoch_values_are_means_over_samples(make_data: Callable, make_trainer: Callable) -> None:
    """Of one epoch: the second one starts counting anew."""
    torch.manual_seed(0)
    data, model = make_data(batch_size=150), spread_out(LeNet(optimizer=lambda params: SGD(params, lr=0.0)))
    trainer = make_trainer(max_epochs=2)
    trainer.fit(model, data)  # 402 samples in batches of 150, 150, 102; the learning rate keeps the model as it is
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (tested,) = trainer.test(model, data, verbose=False)
    for stage, values in (("train", logged), ("val", logged), ("test", tested)):
        loss, acc = by_hand(model, data, stage)
        assert values[f"{stage}_loss"] == pytest.approx(loss, rel=1e-5)
        assert values[f"{stage}_acc"] == pytest.approx(acc, abs=1e-6)


def test_label_smoothing_is_of_the_training_loss_alone(make_data: Callable, make_trainer: Callable) -> None:
    torch.manual_seed(0)
    data = make_data(batch_size=150)
    model = spread_out(LeNet(optimizer=lambda params: SGD(params, lr=0.0), label_smoothing=0.3))
    trainer = make_trainer()
    trainer.fit(model, data)
    X, y = data.train_set[0, data.train_indices]
    wanted = F.cross_entropy(model(X), y, label_smoothing=0.3).item()
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(wanted, rel=1e-5)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(by_hand(model, data, "val")[0], rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("auto", {"flip_tta": True}),
        ("auto", {"shift_tta": True}),
        ("manual_allreduce", {"flip_tta": True, "shift_tta": True}),
    ],
)
def test_views_are_asked_in_evaluation_alone(
    make_data: Callable, make_trainer: Callable, strategy: str, options: dict[str, bool]
) -> None:
    torch.manual_seed(0)
    data = make_data(batch_size=150)
    model = spread_out(LeNet(optimizer=lambda params: SGD(params, lr=0.0), **options))
    trainer = make_trainer(strategy=strategy, devices=1 if strategy == "auto" else 2)
    trainer.fit(model, data)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (tested,) = trainer.test(model, data, verbose=False)
    net = deepcopy(model.net)
    assert logged["train_loss"] == pytest.approx(by_hand(net, data, "train")[0], rel=1e-5)
    mean = partial(mean_of_views, net, **options)
    for stage, values in (("val", logged), ("test", tested)):
        loss, acc = by_hand(mean, data, stage)
        assert abs(loss - by_hand(net, data, stage)[0]) > 0.1
        assert (values[f"{stage}_loss"], values[f"{stage}_acc"]) == pytest.approx((loss, acc), rel=1e-5)
    predictions = torch.cat([batch["probabilities"] for batch in trainer.predict(model, data)])
    X, _ = data.test_set[0, data.test_indices]
    torch.testing.assert_close(predictions, mean(X).softmax(1))


def mean_of_views(net: Callable, X: torch.Tensor, flip_tta: bool = False, shift_tta: bool = False) -> torch.Tensor:
    """The same with numpy, image by image; a view in place is asked twice where others are moved."""
    views = []
    for image in X.numpy():
        padded = np.pad(image, [(0, 0), (1, 1), (1, 1)], constant_values=image.min())
        moved = [padded[:, n : n + 28, n : n + 28] for n in ([1, 1, 0, 2] if shift_tta else [1])]
        views.append(np.stack(moved + [view[..., ::-1] for view in moved] if flip_tta else moved))
    answers = net(torch.from_numpy(np.concatenate(views)))
    return answers.reshape(len(X), -1, answers.shape[-1]).mean(1)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float64, 1 / 3), (torch.bfloat16, 0.5)], ids=str)
def test_mean_loss_keeps_its_digits(dtype: torch.dtype, value: float) -> None:
    """Those of float64, and of float32 where the model is in bfloat16."""
    metric = torch.nn.ModuleList([MeanLoss()]).to(dtype)[0]  # as `bf16-true` does
    for _ in range(300):
        metric.update(torch.tensor(value, dtype=dtype), 200)
    assert abs(float(metric.compute()) - value) < 1e-15


def rates(make_data: Callable, make_trainer: Callable, **kwargs: Any) -> list[float]:
    """The learning rates of 2 epochs of 4 steps, from 0.1."""
    recorder = Rates()
    optimizer = kwargs.pop("optimizer", lambda params: SGD(params, lr=0.1))
    trainer = make_trainer(max_epochs=2, callbacks=[recorder], limit_train_batches=4)
    trainer.fit(LeNet(optimizer=optimizer, **kwargs), make_data())
    return recorder.rates


def test_step_lr_steps_every_epoch_and_without_a_scheduler_the_rate_stays(
    make_data: Callable, make_trainer: Callable
) -> None:
    assert rates(make_data, make_trainer, optimizer=partial(AdamW, lr=0.1)) == [0.1] * 8
    found = rates(make_data, make_trainer, lr_scheduler=partial(StepLR, step_size=1, gamma=0.5))
    assert found == [0.1] * 4 + [0.05] * 4


@pytest.mark.parametrize(("interval", "steps_each"), [(None, 1), ("epoch", 4)])
def test_one_cycle_is_over_when_the_run_is(
    interval: Any, steps_each: int, make_data: Callable, make_trainer: Callable
) -> None:
    """By itself it steps every batch."""
    make = partial(OneCycleLR, max_lr=0.4)
    options = {"lr_interval": interval} if interval else {}
    found = rates(make_data, make_trainer, lr_scheduler=make, **options)
    scheduler = make(optimizer := SGD([torch.zeros(1, requires_grad=True)], lr=0.1), total_steps=8 // steps_each)
    wanted = list(scheduler.get_last_lr())
    for _ in range(8 // steps_each - 1):
        optimizer.step()
        scheduler.step()
        wanted += scheduler.get_last_lr()
    assert found == pytest.approx([rate for rate in wanted for _ in range(steps_each)])


def test_one_cycle_needs_an_end_and_is_not_prolonged(
    make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    make = partial(LeNet, lr_scheduler=partial(OneCycleLR, max_lr=0.4))
    trainer = make_trainer(max_epochs=2)
    trainer.fit(make(), make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    steps = 2 * trainer.num_training_batches
    with pytest.raises(ValueError, match=r"OneCycleLR needs to know when the run ends: set trainer\.max_epochs"):
        make_trainer(max_epochs=-1).fit(make(), make_data())
    with pytest.raises(
        ValueError, match=rf"OneCycleLR is over after {steps} steps and cannot be prolonged to {2 * steps}"
    ):
        make_trainer(max_epochs=4).fit(make(), make_data(), ckpt_path=tmp_path / "x.ckpt")


def test_reduce_on_plateau_watches_val_loss(make_data: Callable, make_trainer: Callable) -> None:
    scheduler = partial(ReduceLROnPlateau, factor=0.1, patience=0, threshold=1e6, threshold_mode="abs")
    recorder = Rates()
    trainer = make_trainer(max_epochs=3, callbacks=[recorder], limit_train_batches=1)
    trainer.fit(LeNet(optimizer=lambda p: SGD(p, lr=0.1), lr_scheduler=scheduler), make_data())
    assert recorder.rates == pytest.approx([0.1, 0.1, 0.01])  # the first epoch is the best yet, the second no better


def test_wrong_optimizer_argument_is_a_clear_error(make_data: Callable, make_trainer: Callable) -> None:
    with pytest.raises(ValueError, match=r"model\.optimizer .*Invalid learning rate: -1"):
        make_trainer().fit(LeNet(optimizer=lambda p: SGD(p, lr=-1)), make_data())


@pytest.mark.parametrize("model_class", [LeNet, ResNet18])
def test_checkpoint_made_in_python_is_plain_and_reloads(
    model_class: type, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    model = model_class(lr_scheduler=partial(StepLR, step_size=1))
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(model, make_data(batch_size=4))
    trainer.save_checkpoint(path := tmp_path / "model.ckpt")
    hparams = torch.load(path, weights_only=True)["hyper_parameters"]
    assert all(value is None or isinstance(value, (int, float, str)) for value in hparams.values())
    again = model_class.load_from_checkpoint(path, weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))


def test_checkpoint_made_by_the_command_line_is_plain_and_reloads(root: Path, main: Callable, tmp_path: Path) -> None:
    args = ("--trainer.max_epochs=1", "--data.val_size=101", "--model.optimizer=AdamW", "--model.num_classes=12")
    assert main("fit", f"--data.root={root}", "--run_dir=run", "--trainer.accelerator=cpu", *args) == 0
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    hparams = torch.load(path, weights_only=True)["hyper_parameters"]
    assert hparams["optimizer"]["class_path"] == "torch.optim.AdamW"
    model = LeNet.load_from_checkpoint(path, weights_only=True)
    assert model.net[-1].out_features == 12
    assert isinstance(model.configure_optimizers(), AdamW)


def test_no_metric_is_computed_before_there_is_something_in_it(
    make_data: Callable, make_trainer: Callable, recwarn: pytest.WarningsRecorder
) -> None:
    """As a callback does that looks at the metrics when an epoch starts."""
    trainer = make_trainer(callbacks=[LearningRateMonitor()], logger=CSVLogger(make_trainer().default_root_dir))
    trainer.fit(LeNet(), make_data())
    assert not [warning for warning in recwarn if "before the ``update`` method" in str(warning.message)]
