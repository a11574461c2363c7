"""Mistakes on the command line end in one line, and take no file of the user's; defects keep their traceback."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning_mgpu.errors import UsageError

JARGON = ("Traceback", "Parser key", "Namespace", "NestedArg", "Subtypes", "usage:", "`")
CPU = "--trainer.accelerator=cpu"
TREE = "--trainer.strategy=manual_allreduce --trainer.strategy.allreduce=needy.Tree"
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
    "fit --trainer.strategy=manual_allreduce --trainer.strategy.bucket_mb=-1": ("error: bucket_mb=-1.0: choose 0",),
    "fit --trainer.strategy=dp --trainer.strategy.parallel_devices=[cpu,gpuu]": ("error: parallel_devices: 'gpuu' is",),
    "fit --trainer.strategy=manual_allreduce --trainer.strategy.allreduce=tree_allreduc": (
        "--trainer.strategy.allreduce=tree_allreduc: give the dotted path of a function, my_module.my_function",
        "did you mean lightning_mgpu.allreduce.tree_allreduce?",
    ),
    "fit --trainer.strategy=manual_allreduce --trainer.strategy.allreduce=mine:reduce": (
        "=mine:reduce: give the dotted",
    ),
    "fit --trainer.strategy=manual_allreduce --trainer.strategy.allreduce=null": ("allreduce=None: give a function",),
    f"fit {TREE} --trainer.strategy.allreduce.gruop=3": (
        "--trainer.strategy.allreduce.gruop=3: Tree has no argument 'gruop'",
        "did you mean --trainer.strategy.allreduce.group?",
    ),
    "fit --trainer.strategy=needy.Keyed": ("error: KeyError: 'star' (",),
    "fit --trainer.barebones=true": ("--trainer.barebones=true: not taken; it would leave out the run's log",),
    "fit --verbose=true": ("--verbose=true: an option of validate and test alone: leave it out here",),
    "fit --config verbose.yaml": ("verbose in the configuration: an option of validate and test alone",),
    "--config mixed.yaml fit": ("--config=mixed.yaml holds options of fit and test, and trainer: put all under",),
    "--config flat.yaml fitt": ("error: no subcommand 'fitt' (did you mean fit?); choose one of fit, validate, ",),
    "--config=two.yaml tset": ("error: no subcommand 'tset' (did you mean test?); choose one of fit, validate, ",),
    "--config flat.yaml sweep": ("error: sweep: name it first, and what it takes behind it (",),
    "--config one.yaml --trainer.devices=2 fit": ("error: fit: not expected here; one subcommand comes first (",),
    "fit --config one_test.yaml": ("error: --config=one_test.yaml has options of test, but none of fit: leave it out",),
    "--config=subcommand.yaml": ("error: --config=subcommand.yaml names a subcommand, but has no section for any",),
    "fit -trainer.max_epochs=3": ("-trainer.max_epochs=3: not expected here; options are written --trainer.",),
    "--config=no_mapping.yaml fit": ("--config=no_mapping.yaml: fit is no mapping of options by name, but 3",),
    "--config two.yaml --trainer.devices=2": ("--config=two.yaml: name a subcommand first, one of fit, test (",),
    "--config model/resnet18.yaml": ("name a subcommand first, one of fit, validate, test, predict (",),
    "--config": ("error: --config: expected one argument (",),
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
from lightning_mgpu.strategies import ManualAllreduceStrategy

class Tree:
    def __init__(self, group: int = 2) -> None:
        self.group = group

    def __call__(self, tensors: list) -> None: ...

class Keyed(ManualAllreduceStrategy):
    def __init__(self, topology: str = "star") -> None:
        super().__init__()
        {"ring": 1}[topology]

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
    "verbose.yaml": "verbose: true\n",
    "mixed.yaml": "fit: {}\ntest: {}\ntrainer: {max_epochs: 2}\n",
    "no_mapping.yaml": "fit: 3\n",
    "two.yaml": "fit: {}\ntest: {}\n",
    "one.yaml": "fit: {}\n",
    "one_test.yaml": "test: {}\n",
    "subcommand.yaml": "subcommand: fit\ntrainer: {max_epochs: 2}\n",
    "flat.yaml": "trainer: {max_epochs: 2}\n",
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


def test_a_package_lightning_misses(
    main: Callable, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("lightning.pytorch.callbacks.device_stats_monitor._PSUTIL_AVAILABLE", False)
    brief = (CPU, "--trainer.devices=1", f"--data.root={root}", "--data.val_size=9", "--trainer.limit_train_batches=1")
    assert main("fit", *brief, "--run_dir=run", "--trainer.callbacks=DeviceStatsMonitor") == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and err.startswith("error: ") and "`psutil` is not installed" in err
    assert not Path("run").exists()


def test_ctrl_c_outside_training(main: Callable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """In training Lightning handles it."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_mgpu.__main__.CLI", interrupted)
    assert main("fit") == 130 and capfd.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt):
        main("fit", "--traceback")


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
def test_a_metric_nobody_logs(main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Of EarlyStopping it is the user's; val_acc is what the command line takes for the user's if it is there."""
    brief = (
        CPU,
        f"--data.root={root}",
        "--data.val_size=9",
        "--trainer.limit_train_batches=1",
        "--trainer.max_epochs=1",
    )
    stopping = ("--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val_los")
    assert main("fit", *brief, *stopping) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: Early stopping conditioned on metric `val_los` which is not available.")
    own = "    def validation_step(self, batch, batch_idx):\n        self.log('val_f1', 1.0)\n"
    own += "    def on_validation_epoch_end(self):\n        pass\n"
    (tmp_path / "mine.py").write_text(f"from lightning_mgpu.models import LeNet\nclass Mine(LeNet):\n{own}")
    assert main("fit", *brief, "--model=mine.Mine", "--run_dir=run") == 0
    assert len(list((tmp_path / "run" / "checkpoints").glob("epoch=0-step=1.ckpt"))) == 1


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
