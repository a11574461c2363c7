"""Logged values equal a computation by hand; schedulers step; a checkpoint reloads in Python."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from lightning_mgpu.models import LeNet
from lightning_mgpu.models.classifier import MeanLoss
from lightning_mgpu.project import find_configs


def by_hand(model: Callable, data: Any, stage: str) -> tuple[float, float]:
    """Mean loss and accuracy over a stage's samples, all at once."""
    indices = getattr(data, f"{stage}_indices")
    X, y = getattr(data, f"{stage}_set")[0, indices]
    with torch.no_grad():
        logits = model(X)
    accuracy = (logits.argmax(1) == y).double().mean().item()
    return F.cross_entropy(logits.double(), y).item(), accuracy


@pytest.fixture
def measured(make_data: Callable, make_trainer: Callable) -> Callable[..., Any]:
    """Trains with a learning rate of 0, and tests; returns what was logged."""

    def measured(options: dict[str, Any], **settings: Any) -> Any:
        torch.manual_seed(0)
        data = make_data(batch_size=150)
        model = LeNet(optimizer=lambda params: SGD(params, lr=0.0), **options)
        for parameter in model.parameters():  # so large that batches differ in loss
            torch.nn.init.normal_(parameter, std=0.3)
        trainer = make_trainer(**settings)
        trainer.fit(model, data)  # 402 samples in batches of 150, 150, 102
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return model, data, trainer, logged | trainer.test(model, data, verbose=False)[0]

    return measured


def test_epoch_values_are_means_over_samples(measured: Callable) -> None:
    """The second epoch counts only its own samples. Only the training loss is smoothed."""
    model, data, _, logged = measured({"label_smoothing": 0.3}, max_epochs=2)
    X, y = data.train_set[0, data.train_indices]
    smoothed = F.cross_entropy(model(X), y, label_smoothing=0.3).item()
    for stage in ("train", "val", "test"):
        loss, acc = by_hand(model, data, stage)
        expected = smoothed if stage == "train" else loss
        assert logged[f"{stage}_loss"] == pytest.approx(expected, rel=1e-5)
        assert logged[f"{stage}_acc"] == pytest.approx(acc, abs=1e-6)


def test_mirror_images_are_used_only_in_evaluation(measured: Callable) -> None:
    model, data, trainer, logged = measured(
        {"flip_tta": True}, strategy="manual_allreduce", devices=2
    )
    net = deepcopy(model.net)
    assert logged["train_loss"] == pytest.approx(by_hand(net, data, "train")[0], rel=1e-5)

    def both(X: torch.Tensor) -> torch.Tensor:
        return (net(X) + net(X.flip(-1))) / 2

    for stage in ("val", "test"):
        loss, acc = by_hand(both, data, stage)
        assert abs(loss - by_hand(net, data, stage)[0]) > 0.1
        logged_values = (logged[f"{stage}_loss"], logged[f"{stage}_acc"])
        assert logged_values == pytest.approx((loss, acc), rel=1e-5)
    predictions = torch.cat([batch["probabilities"] for batch in trainer.predict(model, data)])
    X, _ = data.test_set[0, data.test_indices]
    torch.testing.assert_close(predictions, both(X).softmax(1))


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float64, 1 / 3), (torch.bfloat16, 0.5)], ids=str
)
def test_mean_loss_keeps_its_digits(dtype: torch.dtype, value: float) -> None:
    """Those of float64, and of float32 where the model is in bfloat16."""
    metric = torch.nn.ModuleList([MeanLoss()]).to(dtype)[0]  # as `bf16-true` does
    for _ in range(300):
        metric.update(torch.tensor(value, dtype=dtype), 200)
    assert abs(float(metric.compute()) - value) < 1e-15


@pytest.fixture
def rates(make_data: Callable, make_trainer: Callable) -> Callable[..., list[float]]:
    """The learning rates of every step."""

    def rates(num_epochs: int = 2, num_batches: int = 4, **kwargs: Any) -> list[float]:
        found = []

        class Watched(LeNet):
            def on_train_batch_start(self, *args: Any) -> None:
                found.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]

        trainer = make_trainer(max_epochs=num_epochs, limit_train_batches=num_batches)
        trainer.fit(Watched(optimizer=partial(SGD, lr=0.1), **kwargs), make_data())
        return found

    return rates


def test_schedulers_step_every_epoch(rates: Callable) -> None:
    assert rates() == [0.1] * 8
    assert rates(lr_scheduler=partial(StepLR, step_size=1, gamma=0.5)) == [0.1] * 4 + [0.05] * 4
    # By val_loss: with this threshold no epoch is better than the first.
    threshold = {"threshold": 1e6, "threshold_mode": "abs"}
    plateau = partial(ReduceLROnPlateau, factor=0.1, patience=0, **threshold)
    found = rates(3, 1, lr_scheduler=plateau)
    assert found == pytest.approx([0.1, 0.1, 0.01])


def test_one_cycle_steps_every_batch_and_is_over_when_the_run_is(rates: Callable) -> None:
    found = rates(lr_scheduler=partial(OneCycleLR, max_lr=0.4))
    assert len({*found}) == 8 and max(found) == pytest.approx(0.4, rel=0.1)
    # torch's default factors
    assert (found[0], found[-1]) == pytest.approx((0.4 / 25, 0.4 / 25 / 1e4))


@pytest.mark.parametrize("config", [["--model.lr_scheduler=OneCycleLR"], ["--config", "file.yaml"]])
def test_one_cycle_reaches_the_optimizers_rate(
    config: list[str], root: Path, main: Callable, tmp_path: Path
) -> None:
    """So a sweep over `model.optimizer.lr` compares different runs."""
    recipe = yaml.safe_load(
        (find_configs("lightning_mgpu") / "experiment" / "lenet_fast.yaml").read_text()
    )
    scheduler = recipe["model"]["init_args"]["lr_scheduler"]
    text = yaml.safe_dump({"model": {"init_args": {"lr_scheduler": scheduler}}})
    (tmp_path / "file.yaml").write_text(text)
    short = (f"--data.root={root}", "--run_dir=run", "--trainer.accelerator=cpu", "--no-wandb")
    args = ("--trainer.max_epochs=1", "--model.optimizer.lr=0.03", "--data.val_size=101")
    assert main("fit", *short, *args, *config) == 0
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["max_lr"] == 0.03


def test_mistakes_raise_a_value_error(make_data: Callable, make_trainer: Callable) -> None:
    model = LeNet(lr_scheduler=partial(OneCycleLR, max_lr=0.4))
    message = r"OneCycleLR needs to know when the run ends: set trainer\.max_epochs"
    with pytest.raises(ValueError, match=message):
        make_trainer(max_epochs=-1).fit(model, make_data())
    with pytest.raises(ValueError, match=r"model\.optimizer .*Invalid learning rate: -1"):
        make_trainer().fit(LeNet(optimizer=lambda p: SGD(p, lr=-1)), make_data())


def test_a_checkpoint_reloads_in_python(root: Path, main: Callable, tmp_path: Path) -> None:
    run = (f"--data.root={root}", "--run_dir=run", "--trainer.accelerator=cpu")
    args = ("--trainer.max_epochs=1", "--data.val_size=101", "--model.optimizer=AdamW")
    assert main("fit", *run, *args, "--model.num_classes=12") == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    model = LeNet.load_from_checkpoint(checkpoint, weights_only=True)
    assert model.net[-1].out_features == 12
    assert isinstance(model.configure_optimizers(), AdamW)
