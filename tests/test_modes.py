"""The shipped YAMLs at work: debugging, searches, callbacks, the example to copy."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgpu.callbacks.search import plot_losses, suggestion
from lightning_mgpu.models import LeNet
from tests.runs.conftest import last, metrics

CPU = "--trainer.accelerator=cpu"
KEYS = ("train_loss", "val_loss")
TWO_REPLICAS = ("--trainer.devices=2", "--trainer.strategy=manual_allreduce")


@pytest.fixture
def fit(main: Callable[..., int], root: Path) -> Iterator[Callable[..., int]]:
    """Run `fit` on the tiny dataset: 402 images to train on, 101 to validate."""
    yield lambda *args: main(
        "fit", CPU, f"--data.root={root}", "--data.val_size=101", "--data.batch_size=64", *args
    )
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("args", [("--trainer.devices=1",), TWO_REPLICAS])
def test_debug_is_short_and_finds_nans(
    args: tuple[str, ...],
    fit: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    assert fit("--config=debug/default.yaml", "--run_dir=run", *args) == 0
    assert "epoch 2/2" in capfd.readouterr().out and torch.are_deterministic_algorithms_enabled()
    assert last(tmp_path / "run")["global_step"] == 10
    theirs = LeNet.training_step

    def training_step(self: LeNet, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (theirs(self, batch, batch_idx) * 0).sqrt()  # its gradient is 0 / 0

    monkeypatch.setattr(LeNet, "training_step", training_step)
    with pytest.raises(RuntimeError, match=r"SqrtBackward0|MulBackward0' returned nan"):
        fit("--config=debug/default.yaml", *args)


@pytest.mark.slow
def test_one_batch_is_learnt_by_heart(fit: Callable, tmp_path: Path) -> None:
    """The batch is the same in every epoch: the images are not augmented."""
    faster = (
        "--trainer.max_epochs=40",
        "--data.batch_size=8",
        "--model.init=kaiming",
        "--model.optimizer=Adam",
        "--model.optimizer.lr=0.01",
        "--data.augment=true",
        "--data.cutout=20",
    )
    assert fit("--config=debug/overfit.yaml", *faster, "--run_dir=run", *TWO_REPLICAS) == 0
    assert last(tmp_path / "run")["global_step"] == 40  # one batch an epoch
    assert [float(row["train_loss"]) for row in metrics(tmp_path / "run") if row["train_loss"]][
        -1
    ] < 0.05


def test_overfit_takes_any_model_and_data(main: Callable[..., int]) -> None:
    """Lightning's own, which have no arguments at all."""
    boring = "lightning.pytorch.demos.boring_classes.Boring"
    classes = (f"--model={boring}Model", f"--data={boring}DataModule")
    args = (CPU, "--trainer.devices=1", "--trainer.max_epochs=2", "--run_dir=run")
    assert main("fit", "--config=debug/overfit.yaml", *classes, *args) == 0
    assert last(Path("run"))["global_step"] == 2


def test_the_example_to_copy_trains(fit: Callable, tmp_path: Path) -> None:
    few = [f"--trainer.limit_{stage}_batches=1" for stage in ("val", "test")]
    data = ("--data.batch_size=8", "--data.val_size=101")
    args = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=2", *data, *few, *TWO_REPLICAS)
    assert fit("--config=experiment/example.yaml", "--run_dir=run", *args) == 0
    assert last(tmp_path / "run")["global_step"] == 2


def test_early_stopping_ends_a_run_that_learns_nothing(fit: Callable, capfd: Any) -> None:
    args = ("--trainer.max_epochs=9", "--trainer.limit_train_batches=1", *TWO_REPLICAS)
    assert fit("--config=callbacks/early_stopping.yaml", "--model.optimizer.lr=0", *args) == 0
    out = capfd.readouterr().out
    assert "epoch 4/9" in out and "epoch 5/9" not in out
    assert "stopped early: val_acc has not improved for 3 epochs" in out


def test_ema_changes_what_is_validated_and_saved_but_not_the_training(
    fit: Callable, tmp_path: Path
) -> None:
    ema = ("--config=callbacks/ema.yaml", "--trainer.callbacks.update_starting_at_step=2")
    args = ("--trainer.max_epochs=2", "--model.init=kaiming", *TWO_REPLICAS)
    assert fit("--run_dir=plain", *args) == fit("--run_dir=ema", *ema, *args) == 0
    rows = [metrics(tmp_path / name) for name in ("plain", "ema")]
    train, val = ([[row[key] for row in run if row[key]] for run in rows] for key in KEYS)
    assert train[0] == train[1] and val[0] != val[1]
    plain, average = (last(tmp_path / name)["state_dict"] for name in ("plain", "ema"))
    assert all(not plain[name].equal(average[name]) for name in plain)


def test_learning_rate_search_agrees_over_strategies(
    fit: Callable, tmp_path: Path, capfd: Any
) -> None:
    found = []
    for number, args in enumerate([("--trainer.devices=1",), TWO_REPLICAS]):
        assert (
            fit(
                "--config=search/lr_find.yaml",
                "--model.init=kaiming",
                f"--run_dir=run{number}",
                *args,
            )
            == 0
        )
        out = capfd.readouterr().out
        assert "test acc" not in out and "epoch" not in out
        found.append(re.search(r"lr_find: +(\S+), where the loss falls fastest", out)[1])  # type: ignore[index]
        assert f"falls fastest: --model.optimizer.lr={found[-1]}\n" in out
        left = {path.name for path in (tmp_path / f"run{number}").iterdir()}
        assert left == {"config.yaml", "model.txt", "run.json", "lr_find.png"}
    assert found[0] == found[1] and 0.001 < float(found[0]) < 1


RATES = [10 ** (-3 + 4 * i / 99) for i in range(100)]
FALLS_THEN_EXPLODES = [
    2.3 - 1 / (1 + math.exp(-(i - 50) / 5)) if i < 80 else 2.0 ** (i - 78) for i in range(100)
]


def test_a_suggestion_is_where_the_loss_falls_and_is_sane() -> None:
    """A flat or exploding loss has none."""
    lr = suggestion(RATES, FALLS_THEN_EXPLODES)
    assert lr == RATES[50]
    low, high = plot_losses(RATES, FALLS_THEN_EXPLODES, lr).axes[0].get_ylim()
    assert 1 < low < high < 4  # the explosion does not squeeze the rest
    for losses in ([2.3] * 100, [2.3, 9.0, math.nan] * 33, [2.3]):
        assert suggestion(RATES, losses) is None


SEARCH = (
    "--trainer.callbacks=BatchSizeSearch",
    "--trainer.callbacks.init_val=16",
    "--trainer.callbacks.max_trials=3",
)


def test_batch_size_search_counts_global_batches(
    fit: Callable, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    assert fit(*SEARCH, *TWO_REPLICAS) == 0
    out = capfd.readouterr().out
    assert "batch_find: 64 global; the largest tried, nothing ran out of memory\n" in out
    assert (
        "use it with --data.batch_size=64\n" in out and "test acc" not in out and "epoch" not in out
    )
    theirs = LeNet.training_step

    def training_step(self: LeNet, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if len(batch[1]) > 32:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return theirs(self, batch, batch_idx)

    monkeypatch.setattr(LeNet, "training_step", training_step)
    assert fit(*SEARCH, "--trainer.devices=1") == 0
    assert "batch_find: 32 global; twice as many do not fit" in capfd.readouterr().out


def test_profile_sees_the_operators_of_all_replicas(fit: Callable, tmp_path: Path) -> None:
    assert fit("--config=debug/profile.yaml", "--run_dir=run", *TWO_REPLICAS) == 0
    assert "aten::mkldnn_convolution" in (tmp_path / "run" / "fit-profile.txt").read_text()
    (trace,) = (tmp_path / "run").glob("fit-profile-*.json")
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("aten::conv2d") == 3 * 2 * 2  # batches, replicas, convolutions
