"""The command line in this process: configurations compose, classes have their defaults, runs end as they should."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.strategies import Strategy
from lightning_mgpu.checks import check_given, check_secrets
from lightning_mgpu.errors import UsageError
from lightning_mgpu.explain import class_names, did_you_mean, explain

from lightning_mgpu import __version__
from lightning_mgpu.cli import CONFIGS

CPU = "--trainer.accelerator=cpu"


def test_a_logger_of_ones_own_writes_where_it_says(
    main: Callable, root: Path, tmp_path: Path, run_files: set[str], capfd: pytest.CaptureFixture
) -> None:
    data = (f"--data.root={root}", "--data.val_size=101", CPU, "--trainer.max_epochs=1")
    logger = ("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs")
    assert main("fit", *data, *logger, "--run_dir=run") == 0
    theirs = {"metrics.csv", "hparams.yaml"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == run_files - theirs
    assert {path.name for path in (tmp_path / "logs").rglob("*.*")} == theirs
    assert main("fit", "--resume=run", "--trainer.max_epochs=2") == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == run_files - theirs
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["epoch"] == 2
    assert main("fit", *data, *logger, "--trainer.fast_dev_run=1") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "logs"}
    for other, has_wandb in (("lightning.pytorch.loggers.logger.DummyLogger", True), ("false", False)):
        capfd.readouterr()
        assert main("fit", *data, f"--trainer.logger={other}", f"--run_dir={has_wandb}") == 0
        assert {path.name for path in (tmp_path / str(has_wandb)).iterdir()} == run_files - theirs
        assert ("\nwandb:    off" in capfd.readouterr().out) == has_wandb
    theirs_alone = ("--trainer.logger=WandbLogger", "--trainer.logger.mode=disabled", "--wandb.project=x", "--no-wandb")
    assert main("fit", *data, *theirs_alone, "--run_dir=wandb") == 0
    assert "\nwandb:    by --trainer.logger; of --wandb.* only watch" in capfd.readouterr().out


def test_values_are_compared_with_their_own_options() -> None:
    config = Namespace(traceback=True, wandb=Namespace(notes="lr: high"), trainer=Namespace(max_epochs=90))
    check_given(["--traceback", "--wandb.notes=lr: high", "--trainer.max_epochs", "--x=1:30"], config)
    with pytest.raises(UsageError, match=r"--trainer\.max_epochs=1:30: would be read as the number 90"):
        check_given(["--trainer.max_epochs", "1:30"], config)


def test_numbers_in_brackets_are_those_written() -> None:
    for text in ("[draft] 010", "{010}", "[1:30]"):  # text is text
        check_given([f"--wandb.notes={text}"], Namespace(wandb=Namespace(notes=text)))
    for args in (["--data.crops+", "[8]", "--data.crops=[010]"], ["--data.crops", "[010]"]):
        with pytest.raises(UsageError, match=r"--data\.crops=\[010\]: 010 would be read as"):
            check_given(args, Namespace(data=Namespace(crops=[8])))
    with pytest.raises(UsageError, match="max_epochs stands twice"):
        check_given(['--trainer={"max_epochs":3,"max_epochs":4}'], Namespace(trainer=Namespace(max_epochs=4)))


def test_fit_ends_with_the_books_line(
    main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture, run_files: set[str]
) -> None:
    assert main("fit", f"--data.root={root}", "--data.val_size=101", CPU, "--trainer.max_epochs=2") == 0
    out, err = capfd.readouterr()
    assert err == ""
    labels = [line.split(":")[0].split()[0] for line in out.splitlines()]
    assert labels == ["model", "strategy", "batch", "data", "run", "wandb", "epoch", "epoch", "test"]
    assert out.splitlines()[-1].startswith("test acc: 0.")
    assert out.splitlines()[-1].endswith(" sec/epoch on [device(type='cpu')]")
    (run,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in run.iterdir()} == run_files
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    assert "129 K" in (run / "model.txt").read_text()


def test_fast_dev_run_leaves_nothing(main: Callable, root: Path, tmp_path: Path) -> None:
    assert main("fit", f"--data.root={root}", "--data.val_size=101", CPU, "--trainer.fast_dev_run=1") == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("subcommand", ["predict", "test", "validate"])
def test_evaluation_without_a_checkpoint_warns(
    subcommand: str, main: Callable, root: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    assert main(subcommand, f"--data.root={root}", "--data.val_size=101", CPU, "--run_dir=run") == 0
    assert [str(w.message) for w in recwarn if "ckpt_path" in str(w.message)] == [
        f"{subcommand} without --ckpt_path: the weights are untrained."
    ]
    assert (tmp_path / "run" / "predictions.csv").exists() == (subcommand == "predict")


def test_nothing_prints_help(main: Callable, capfd: pytest.CaptureFixture) -> None:
    assert main() == 0
    out = capfd.readouterr().out
    assert out.startswith("usage: python -m lightning_mgpu")
    assert "\n    python -m lightning_mgpu fit --trainer.devices=2\n" in out
    assert main("fit", "--model.help=LeNet") == 0
    assert capfd.readouterr().out.startswith("usage: python -m lightning_mgpu ")
    assert main("fit", "--help") == 0
    out = capfd.readouterr().out
    assert "--run_dir RUN_DIR" in out and "--trainer.devices" in out and "--data.help" in out
    assert main("--version") == 0
    assert capfd.readouterr().out.strip() == f"python -m lightning_mgpu {__version__}"


def test_configurations_compose(main: Callable, capfd: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("trainer:\n  max_epochs: 3\n  devices: 5\n")
    shipped = ("--config", "model/resnet18.yaml", "--config=trainer/one_device.yaml")
    assert main("fit", "--config=mine.yaml", *shipped, "--data.batch_size=32", "--print_config") == 0
    config = yaml.safe_load(capfd.readouterr().out)
    assert config["model"]["class_path"].endswith("ResNet18")
    assert config["trainer"]["max_epochs"] == 3 and config["trainer"]["devices"] == 1  # the later file wins
    assert config["data"]["init_args"]["batch_size"] == 32 and config["seed_everything"] == 42


DEFAULTS = {
    ("--model=ResNet18",): {"lr": 0.1, "weight_decay": 0},
    ("--config=experiment/resnet18_book.yaml",): {"lr": 0.1, "weight_decay": 0},
    ("--model=ResNet18", "--model.optimizer.momentum=0.9"): {"lr": 0.1, "momentum": 0.9},
    ("--model.optimizer.momentum=0.9",): {"lr": 0.2, "momentum": 0.9},
    ("--model.optimizer=AdamW",): {"lr": 0.001, "weight_decay": 0.01},
    ("--model.optimizer.weight_decay=0.1", "--model.optimizer=AdamW"): {"lr": 0.001, "weight_decay": 0.1},
    ("--model=ResNet18", "--model.optimizer=AdamW", "--model.optimizer.lr=0.1"): {"lr": 0.1, "weight_decay": 0.01},
}


@pytest.mark.parametrize("args", DEFAULTS, ids=" ".join)
def test_a_class_that_is_named_has_its_own_defaults(
    args: tuple[str, ...], main: Callable, capfd: pytest.CaptureFixture
) -> None:
    assert main("fit", *args, "--print_config") == 0
    optimizer = yaml.safe_load(capfd.readouterr().out)["model"]["init_args"]["optimizer"]["init_args"]
    assert {name: optimizer[name] for name in DEFAULTS[args]} == DEFAULTS[args]


OWN = """
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet

class Letters(LeNet):
    def __init__(self, num_classes: int = 26) -> None:
        super().__init__(num_classes=num_classes)

class Small(FashionMNIST):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__(batch_size)

class Student(Letters):
    def __init__(self, teacher: LeNet | None = None) -> None:
        super().__init__()
"""


def test_classes_of_ones_own_have_their_own_defaults(
    main: Callable, capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "own_classes.py").write_text(OWN)  # found as the console script finds it, which is no `python -m`
    assert main("fit", "--model=own_classes.Letters", "--data=own_classes.Small", "--print_config") == 0
    config = yaml.safe_load(capfd.readouterr().out)
    assert config["model"]["init_args"] == {"num_classes": 26} and config["data"]["init_args"] == {"batch_size": 16}
    student = "own_classes.Student"  # whose teacher is a student, too
    assert main("fit", f"--model={student}", f"--model.teacher={student}", "--print_config") == 0
    teacher = yaml.safe_load(capfd.readouterr().out)["model"]["init_args"]["teacher"]
    assert teacher == {"class_path": student, "init_args": {"teacher": None}}


def test_stars_in_notes_are_no_secret() -> None:
    check_secrets(Namespace(wandb=Namespace(notes="*** the best ***"), data=Namespace(root="data")))
    with pytest.raises(UsageError, match=r"--data\.url=https://\*\*\*@host: a secret"):
        check_secrets(Namespace(data=Namespace(init_args=Namespace(url="https://***@host"))))


def test_a_strategy_class_can_be_named(main: Callable, root: Path, capfd: pytest.CaptureFixture) -> None:
    data = (f"--data.root={root}", "--data.val_size=101", CPU, "--trainer.fast_dev_run=1")
    name = "lightning.pytorch.strategies.SingleDeviceStrategy"
    assert main("fit", *data, f"--trainer.strategy={name}") == 0
    assert "strategy: SingleDeviceStrategy" in capfd.readouterr().out


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_shipped_config_parses_and_names_its_command(path: Path, main: Callable, capfd: pytest.CaptureFixture) -> None:
    relative = str(path.relative_to(CONFIGS))
    if yaml.safe_load(path.read_text()).get("program") is None:  # a sweep is for W&B
        assert main("fit", "--config", relative, "--print_config") == 0, capfd.readouterr().err
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert comment and any(command in line for line in comment for command in ("lightning_mgpu fit", "wandb sweep"))


@pytest.mark.parametrize("args", [("--model.lr_scheduler=ReduceLROnPlateau",), ("--config=mine.yaml",)])
def test_a_name_lightning_has_too_is_torchs(
    args: tuple[str, ...], main: Callable, capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    scheduler: dict[str, Any] = {"class_path": "ReduceLROnPlateau", "init_args": {"patience": 2}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"lr_scheduler": scheduler}}}))
    assert main("fit", *args, "--model.lr_scheduler.factor=0.3", "--print_config") == 0
    found = yaml.safe_load(capfd.readouterr().out)["model"]["init_args"]["lr_scheduler"]
    assert found["class_path"] == "torch.optim.lr_scheduler.ReduceLROnPlateau"
    assert found["init_args"]["factor"] == 0.3 and found["init_args"]["patience"] == (2 if "mine" in args[0] else 10)


def test_a_name_of_two_classes() -> None:
    message = """Parser key "trainer.callbacks":
      - Multiple subclasses with name Mine. Give the full class path to avoid ambiguity: one.Mine, two.Mine.
      - Expected a <class 'NoneType'>
      Given value: Mine"""
    assert (
        explain(message, {}) == "--trainer.callbacks=Mine: more than one class has this name: say one.Mine or two.Mine"
    )


def test_only_strategies_that_can_be_used_are_known() -> None:
    known = class_names(Strategy)
    assert {"DDPStrategy", "DataParallelStrategy", "ManualAllreduceStrategy"} < {*known}
    assert not {"ParallelStrategy", "PerReplica", "ReplicatedStrategy"}.intersection(known)
    assert not {"SingleProcessStrategy", "TrainBatchStrategy"}.intersection(known)


def test_did_you_mean() -> None:
    known = ["data.batch_size", "trainer.devices", "model.optimizer"]
    assert did_you_mean("batch_size", known) == " (did you mean data.batch_size?)"
    assert did_you_mean("devcies", known, "--") == " (did you mean --trainer.devices?)"
    assert did_you_mean("zzz", known) == ""
