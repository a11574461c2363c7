"""The command line in this process: mistakes end in one line, configurations compose, a failure leaves nothing."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

from lightning_mgpu import __version__
from lightning_mgpu.checks import check_given, check_secrets
from lightning_mgpu.cli import CONFIGS
from lightning_mgpu.errors import UsageError
from lightning_mgpu.explain import class_names, did_you_mean, explain

JARGON = ("Traceback", "Parser key", "Namespace", "NestedArg", "Subtypes", "usage:", "`")
CPU = "--trainer.accelerator=cpu"
MISTAKES: dict[str, tuple[str, ...]] = {  # a command line, and what its line must say
    "fitt": ("no subcommand 'fitt'", "did you mean fit?", "validate, test, predict, export, sweep, benchmark"),
    "swep": ("no subcommand 'swep' (did you mean sweep?)",),
    "--trainer.devices=2": ("--trainer.devices=2: name a subcommand first", "fit, validate, test, predict"),
    "fit foo": ("foo: not expected here",),
    "fit --trainer.devcies=2": ("--trainer.devcies=2", "did you mean --trainer.devices?"),
    "fit --optimizer=Adam": ("--optimizer=Adam", "did you mean --model.optimizer?"),
    "fit --batch_size=3": ("did you mean --data.batch_size?",),
    "fit --lr=3": ("did you mean --model.optimizer.lr?",),
    "fit --data.batchsize=3": ("--data.batchsize=3", "FashionMNIST", "did you mean --data.batch_size?", "val_size"),
    "fit --model.lr=3": ("--model.lr=3", "did you mean --model.optimizer.lr?"),
    "fit --model=LeNot": ("--model=LeNot", "did you mean LeNet?", "ResNet18"),
    "fit --model=lightning_mgpu.models.Nope": ("--model=lightning_mgpu.models.Nope", "LeNet", "ResNet18"),
    "fit --model=no.such.Module": ("--model=no.such.Module: no such LightningModule",),
    "fit --model=lightning_mgpu.data.FashionMNIST": ("no such LightningModule", "LeNet", "ResNet18"),
    "fit --data=Foo": ("--data=Foo: no such LightningDataModule", "FashionMNIST"),
    "fit --model.optimizer=Adm": ("--model.optimizer=Adm", "did you mean Adam?", "SGD"),
    "fit --model.optimizer=SGD --model.optimizer.lrr=3": ("--model.optimizer.lrr=3: SGD has no argument 'lrr'",),
    "fit --model.optimizer.lr=abc": ("--model.optimizer.lr=abc: expected a number",),
    "fit --model.lr_scheduler=StepLR": ("--model.lr_scheduler=StepLR also needs --model.lr_scheduler.step_size",),
    "fit --trainer.callbacks=EarlyStopping": (
        "--trainer.callbacks=EarlyStopping also needs --trainer.callbacks.monitor",
    ),
    "fit --model=needy.Needy": ("--model=Needy also needs --model.width and --model.height",),
    "fit --trainer.callbacks=Foo": ("--trainer.callbacks=Foo: no such Callback", "EarlyStopping"),
    f"fit {CPU} --trainer.devices=0": ("--trainer.devices=0: take a number of processes from 1",),
    f"fit {CPU} --trainer.devices=-3": ("--trainer.devices=-3: take",),
    f"fit {CPU} --trainer.devices=abc": ("--trainer.devices=abc: take",),
    "fit --trainer.strategy=dpp": ("--trainer.strategy=dpp", "did you mean d", "auto, ddp, "),
    "fit --trainer.strategy.bucket_mb=25": (
        "--trainer.strategy.bucket_mb=25: say of which strategy, --trainer.strategy=manual_allreduce",
    ),
    "fit --config options.yaml": ("--trainer.strategy: say of which strategy, --trainer.strategy=manual_allreduce",),
    "fit --trainer.strategy=my.Strategy": ("--trainer.strategy=my.Strategy: no such strategy", "auto, ddp, "),
    "fit --trainer.max_epochs=ten": ("--trainer.max_epochs=ten: expected a whole number or null",),
    "fit --trainer.max_epochs": ("--trainer.max_epochs: expected one argument",),
    "fit --trainer.precision=17": ("--trainer.precision=17: expected", "bf16-mixed"),
    "fit --data.batch_size=0": ("data.batch_size=0: the global batch needs at least one sample",),
    "fit --data.batch_size=-1": ("data.batch_size=-1",),
    "fit --data.batch_size=2.5": ("--data.batch_size=2.5: expected a whole number",),
    "fit --data.source=foo": ("--data.source=foo: expected auto or local",),
    "fit --data.val_size=-2": ("data.val_size=-2: choose 0",),
    "fit --data.val_size=60000 --data.source=synthetic": ("data.val_size=60000 leaves none of the 60000",),
    f"fit {CPU} --data.batch_size=1 --trainer.devices=2": ("--data.batch_size=1", "cannot be shared by 2 processes"),
    f"fit {CPU} --trainer.devices=1000": ("--data.batch_size=256", "cannot be shared by 1000 processes"),
    "fit --model.num_classes=5 --data.source=synthetic": ("--model.num_classes=5: the data have 10 classes; take 10",),
    "fit --data.root=a_file": ("a_file", "Not a directory", "data directory that can be written"),
    "fit --config nope.yaml": ("--config=nope.yaml: no such file", "model/resnet18.yaml"),
    "fit --config=model/resnet.yaml": ("did you mean model/resnet18.yaml?",),
    "fit --config empty.yaml": ("--config=empty.yaml is empty",),
    "fit --config list.yaml": ("--config=list.yaml holds a list",),
    "fit --config invalid.yaml": ("--config=invalid.yaml cannot be read as YAML: line 2",),
    "fit --config unknown.yaml": ("trainer.max_epoch", "did you mean trainer.max_epochs?"),
    "fit --config wrong_data.yaml": ("data.batchsize", "did you mean --data.batch_size?"),
    "fit --wandb.mode=foo": ("--wandb.mode=foo: expected auto or online or offline or disabled",),
    "fit --wandb.watch_freq=0": ("--wandb.watch_freq=0: take a number of optimizer steps from 1",),
    "fit --run_dir=used": ("--run_dir=used exists and is not empty",),
    "fit --run_dir=a_file/x": ("a_file/x cannot be made: Not a directory", "--run_dir"),
    "test --ckpt_path nope.ckpt": ("--ckpt_path=nope.ckpt: no such file",),
    "test --ckpt_path=memory://nope.ckpt": ("--ckpt_path=memory://nope.ckpt: no such file",),
    "fit --ckpt_path=http://127.0.0.1:9/nope.ckpt": ("http://127.0.0.1:9/nope.ckpt: no such file, or nobody answers",),
    "fit --ckpt_path=nope://nope.ckpt": ("--ckpt_path=nope://nope.ckpt cannot be read: Protocol not known",),
    "test --ckpt_path=last": ("--ckpt_path=last: name the file",),
    "fit --run_dir=***": ("--run_dir=***: a secret, which is written to no file",),
    "fit --ckpt_path corrupt.ckpt": ("--ckpt_path=corrupt.ckpt cannot be read: it is damaged",),
    "test --ckpt_path other.ckpt": ("--ckpt_path=other.ckpt is no checkpoint of a Trainer's",),
}
NEED_NO_GPU = {"fit --trainer.accelerator=gpu": ("--trainer.accelerator=gpu: no GPU is found here",)}
NEEDY = """
from lightning_mgpu.models import LeNet

class Needy(LeNet):
    def __init__(self, width: int, height: int, **kwargs) -> None:
        super().__init__(**kwargs)
"""
FILES = {
    "a_file": "",
    "empty.yaml": "",
    "list.yaml": "- a\n- b\n",
    "invalid.yaml": "trainer: [1, {\n",
    "unknown.yaml": "trainer:\n  max_epoch: 2\n",
    "wrong_data.yaml": "data:\n  class_path: FashionMNIST\n  init_args:\n    batchsize: 3\n",
    "options.yaml": "trainer:\n  strategy:\n    init_args:\n      bucket_mb: 25\n",
    "needy.py": NEEDY,
    "used/config.yaml": "",
    "corrupt.ckpt": "PK\x03\x04 no zip",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The working directory, with files to give to the command line."""
    (tmp_path / "used").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.ckpt")
    return tmp_path


@pytest.mark.parametrize("args", [*MISTAKES, *NEED_NO_GPU])
@pytest.mark.filterwarnings("ignore:data.source=synthetic")
def test_mistake_ends_in_one_line(args: str, here: Path, main: Callable, capfd: pytest.CaptureFixture) -> None:
    if args in NEED_NO_GPU and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    before = sorted(here.rglob("*"))
    assert main(*args.split()) == 2
    out, err = capfd.readouterr()
    err = err.replace(
        "warning: data.source=synthetic: training on made-up images; no accuracy below means anything.\n", ""
    )
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    assert err.endswith("(--traceback shows where)\n")
    for part in {**MISTAKES, **NEED_NO_GPU}[args]:
        assert part in err
    assert not [word for word in JARGON if word in err]
    assert sorted(here.rglob("*")) == before


def test_one_callback_needs_no_list(main: Callable, root: Path, capfd: pytest.CaptureFixture) -> None:
    callback = "--trainer.callbacks=TQDMProgressBar"  # a progress bar of one's own is taken for ours
    assert main("fit", CPU, f"--data.root={root}", "--data.val_size=9", "--trainer.fast_dev_run=1", callback) == 0
    assert "epoch 1/1" not in capfd.readouterr().out


def test_traceback_shows_where(main: Callable) -> None:
    with pytest.raises(Exception, match=r"data\.batch_size=0"):
        main("fit", "--data.batch_size=0", "--traceback")


def raise_error(module: LightningModule) -> None:
    raise IndexError("a defect")


def log_a_vector(module: LightningModule) -> None:
    module.log("x", torch.zeros(2))  # Lightning raises the ValueError


def write_nowhere(module: LightningModule) -> None:
    raise PermissionError(errno.EACCES, "a defect")


@pytest.mark.parametrize("broken", [raise_error, log_a_vector, write_nowhere])
def test_defects_keep_their_traceback(
    main: Callable, root: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable
) -> None:
    monkeypatch.setattr("lightning_mgpu.models.LeNet.training_step", lambda self, batch, batch_idx: broken(self))
    with pytest.raises((IndexError, ValueError, PermissionError), match=r"a defect|single element"):
        main("fit", f"--data.root={root}", "--data.val_size=9", CPU)


@pytest.mark.slow
def test_checkpoint_of_another_model(
    main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture, make_trainer: Callable
) -> None:
    data = (f"--data.root={root}", "--data.val_size=101", CPU)
    assert main("fit", *data, "--trainer.max_epochs=1", "--run_dir=lenet") == 0
    path = "lenet/checkpoints/last.ckpt"
    capfd.readouterr()
    assert main("test", "--model=ResNet18", "--ckpt_path", path, *data) == 2
    err = capfd.readouterr().err
    assert "is of LeNet, not of ResNet18: take --model=LeNet, or leave --model out" in err
    assert err.count("\n") == 1 and not (tmp_path / "runs").exists()

    checkpoint = torch.load(tmp_path / path, weights_only=True)
    del checkpoint["hyper_parameters"], checkpoint["lightning_mgpu"]  # not of the command line: only weights tell
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    assert main("test", "--ckpt_path=bare.ckpt", "--run_dir=again", *data) == 0
    capfd.readouterr()
    assert main("test", "--model=ResNet18", "--ckpt_path=bare.ckpt", *data) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: the checkpoint is not one of ResNet18: their parameters differ, first in net.")
    assert err.count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("run_dir", ["new/run", "mine"])
@pytest.mark.parametrize("left", ["", "out.csv", "out/part.csv"])
def test_a_mistake_takes_no_file_of_the_users(
    run_dir: str, left: str, main: Callable, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / run_dir
    (tmp_path / "mine").mkdir()

    def write_and_fail(module: LightningModule) -> None:
        assert {file.name for file in path.iterdir()} == {"config.yaml", "model.txt", "hparams.yaml"}
        if left:
            (path / left).parent.mkdir(exist_ok=True)
            (path / left).touch()
        raise UsageError("wrong")

    monkeypatch.setattr("lightning_mgpu.models.LeNet.on_predict_start", write_and_fail, raising=False)
    assert main("predict", f"--data.root={root}", "--data.val_size=9", CPU, f"--run_dir={run_dir}") == 2
    if left:
        assert (path / left).is_file() and (path / "config.yaml").is_file()
    else:
        assert sorted(tmp_path.rglob("*")) == [tmp_path / "mine"]


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
        explain(message, []) == "--trainer.callbacks=Mine: more than one class has this name: say one.Mine or two.Mine"
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
