"""A mistake on the command line ends in at most six lines with status 2, and leaves no file."""

import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import Namespace

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.cli import run_trainer
from lightning_mgpu.cli.checks import check_secrets
from lightning_mgpu.cli.error_messages import one_line_errors
from lightning_mgpu.errors import UsageError

CPU = "--trainer.accelerator=cpu"
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}
SLURM = dict.fromkeys(("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"), "2")
SLURM |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
MISTAKES: dict[str, tuple[str, ...]] = {  # a command line, and what its lines must say
    "fit --trainer.strategy=dpp": (
        "dpp: no such strategy. did you mean dp?",
        "manual_allreduce",
        "my_package.MyStr",
        "registered are auto, ddp, dp, fsdp, manual_allreduce, manual_allreduce_blocked, ",
        "ddp_fork, ... (",  # whole names
    ),
    "fit --trainer.strategy.replicas=4": (
        "--trainer.strategy.replicas=4: an option of which strategy? Add its name, such as",
    ),
    "fit --run_dir=\udcff": ("'--run_dir=\\udcff': it is not UTF-8",),
    "fit --model=old_code.Old": ("import lightning.pytorch instead",),
    f"fit {CPU} --trainer.devices=99": (
        "--trainer.devices=99: take a number of processes from 1 to",
    ),
    f"fit {CPU} --trainer.devices=-3": (
        "`devices` selected with `CPUAccelerator` should be an int > 0",
    ),
    "fit --trainer.accelerator=gpu": ("No supported gpu backend found!",),
    "fit --model=LeNot": ("--model=LeNot", "did you mean LeNet?"),
    "fit --trainer.devcies=2": ("--trainer.devcies=2", "did you mean --trainer.devices?"),
    "fit --batch_size=3": ("did you mean --data.batch_size?",),
    "fit --model.optimizer=SGD --model.optimizer.lrr=3": ("did you mean --model.optimizer.lr?",),
    "fit --model.optimizer=torch.optim": (
        "--model.optimizer=torch.optim",
        "by its path: my_package.MyClass",
    ),
    "fit --model.lr_scheduler=StepLR": ("--model.lr_scheduler=StepLR", "step_size"),
    "fit --data.batch_size=many": ("--data.batch_size=many", "Expected a <class 'int'>"),
    "fit --curve.max_panels=0": ("--curve.max_panels=0:", "v>0"),
    "fit --pictures.num_imges=3": ("Option 'num_imges' is not accepted",),
    "fit --trainer.precision=17": ("--trainer.precision=17", "bf16-mixed"),
    "fit --data.batch_size=0": ("data.batch_size=0: it must be at least 1",),
    "fit --data.val_size=60000 --data.source=synthetic": (
        "data.val_size=60000 leaves none of the 60000",
    ),
    "fit --config=model/resnet.yaml": ("did you mean model/resnet18.yaml?",),
    "fit --model=nowhere.yaml": ("--model=nowhere.yaml: no such file",),
    "fit --data broken.yaml": ("--data=broken.yaml cannot be read as YAML: ",),
    "fit --config broken.yaml": ("--config=broken.yaml cannot be read as YAML: ",),
    "fit --config key.yaml": ("--trainer.max_epoch", "did you mean --trainer.max_epochs?"),
    "test --ckpt_path nope.ckpt": ("nope.ckpt: no such file",),
    "test --ckpt_path foreign.ckpt": ("foreign.ckpt is not a checkpoint of a Trainer",),
    "fit --ckpt_path weights.ckpt": (
        "weights.ckpt holds weights alone: no training can go on from it",
    ),
    "fit --config=validated.yaml": ("--verbose=True:\n  Option 'verbose' is not accepted",),
    "fit --config=renamed.yaml": (
        "--trainer.callbacks.0=lightning_mgpu.callbacks.Pictures: its name is now",
        "lightning_mgpu.callbacks.TestPictures",
    ),
    "test --resume=used": ("--resume: only `fit` can go on with a run",),
    "fitt": ("no subcommand 'fitt'", "did you mean fit?", "validate, test, predict, export"),
    "fit foo": ("unrecognized arguments: foo",),
    "fit --run_dir=used": ("--run_dir=used exists and is not empty",),
    "fit --trainer.logger=CometLogger --trainer.logger.api_key=hunter2": (
        "--trainer.logger.api_key: a secret",
    ),
    "fit --wandb.name=https://me:hunter2@host": (
        "--wandb.name: a secret",
        "hand it over in an environment variable",
    ),
    "fit --resume=nowhere": ("--resume=nowhere: no run directory",),
    "fit --resume=last": ("--resume=last: no run was started here",),
    "test --weights_only=false": ("--weights_only=False: a checkpoint runs no code",),
    "export --ckpt_path=weights.ckpt --output=x.pt2": ("does not say which model it is of",),
    "export --ckpt_path=nope.ckpt --output=x.bin": (
        "--output=x.bin: end the name in .onnx or .pt2",
    ),
}
FILES = {
    "broken.yaml": "trainer: [1, {\n",
    "key.yaml": "trainer:\n  max_epoch: 2\n",
    "used/a_file": "",
    "used/config.yaml": "",
    "validated.yaml": "verbose: true\ncheckpoint: {verbose: false}\n",
    "renamed.yaml": "trainer: {callbacks: [{class_path: lightning_mgpu.callbacks.Pictures}]}\n",
    "old_code.py": "import pytorch_lightning as pl\n\nclass Old(pl.LightningModule): ...\n",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The working directory, with files to give to the command line."""
    (tmp_path / "used").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    return tmp_path


@pytest.mark.parametrize("args", MISTAKES, ids=ascii)
@pytest.mark.filterwarnings("ignore:data.source=synthetic")
def test_mistake_ends_in_a_few_lines(
    args: str, here: Path, main: Callable, capfd: pytest.CaptureFixture
) -> None:
    if "gpu" in args and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    before = sorted(here.rglob("*"))
    assert main(*args.split()) == 2
    out, err = capfd.readouterr()
    lines = [
        line for line in err.splitlines() if not line.startswith("warning: data.source=synthetic")
    ]
    assert out == "" and lines[0].startswith("error: ") and len(lines) <= 6, err
    assert lines[-1].endswith("(--traceback shows where)") and max(map(len, lines)) < 400
    for noise in ("Traceback", "Namespace", "NestedArg", "Subtypes", "usage:", "hunter2"):
        assert noise not in err
    for part in MISTAKES[args]:
        assert part in err
    assert sorted(here.rglob("*")) == before


def test_a_recipe_without_its_extra_says_what_to_install(
    main: Callable, without_package: Callable, capfd: pytest.CaptureFixture
) -> None:
    without_package("timm")
    assert main("fit", "--config=experiment/lenet_fast.yaml") == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "error: --model.optimizer=timm.optim.Muon:" and len(lines) == 3
    assert "No module named 'timm'" in lines[1]
    assert 'pip install timm, or pip install -e ".[fast]" (--traceback' in lines[2]


OWN = """
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet

class Broken(LeNet):
    def __init__(self) -> None:
        super().__init__()
        {}["a defect"]

class Picky(LeNet):
    def __init__(self, pad_token: str = "a", width: int = 3) -> None:  # this token is not a secret
        raise ValueError(f"model.width={width}: take an even number")

class Lacks(LeNet):
    def __init__(self, start_token: str = "") -> None:
        super().__init__()
        if not start_token:
            try:
                open("vocab.json")
            except OSError as error:
                raise ValueError("vocab.json is missing: run prepare.py") from error

class Late(LeNet):
    def training_step(self, batch, batch_idx):
        raise ValueError("a defect")

    def on_train_epoch_start(self) -> None:
        if self.trainer.max_epochs == 7:
            raise MisconfigurationException("in the tenth hour")

class Misfit(LeNet):
    def forward(self, X):
        return super().forward(X.flatten(1))

class NoList(FashionMNIST):
    def train_dataloader(self):
        raise ValueError("no list of files")
"""


def test_code_of_ones_own(
    main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """A constructor's ValueError is a mistake; what else its code raises keeps its traceback."""
    (tmp_path / "own_code.py").write_text(OWN)
    run = ("fit", f"--data.root={root}", "--data.val_size=9", CPU, "--trainer.devices=1")
    assert main(*run, "--model=own_code.Picky", "--model.pad_token=b") == 2
    assert "error: model.width=3: take an even number" in capfd.readouterr().err
    with pytest.raises(Exception, match="take an even number"):
        main(*run, "--model=own_code.Picky", "--traceback")
    with pytest.raises(KeyError, match="a defect") as caught:
        main(*run, "--model=own_code.Broken")
    # without jsonargparse's wrapping
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    with pytest.raises(ValueError, match="a defect"):
        main(*run, "--model=own_code.Late")
    capfd.readouterr()
    assert main(*run, "--model=own_code.Late", "--trainer.max_epochs=7", "--run_dir=late") == 2
    assert "error: in the tenth hour (late/error.log shows where)" in capfd.readouterr().err
    assert "on_train_epoch_start" in (tmp_path / "late" / "error.log").read_text()
    for devices in ("--trainer.devices=1", "--trainer.strategy=manual_allreduce"):
        assert main(*run, devices, "--model=own_code.Misfit", "--run_dir=misfit") == 2
        lines = capfd.readouterr().err.partition("error: ")[2].splitlines()
        assert len(lines) <= 3 and lines[0].startswith("Expected ")
        assert "own_code.py:" in lines[1] and lines[1].endswith("(misfit/error.log shows where)")
        shutil.rmtree("misfit")
    assert main(*run, "--model=own_code.Lacks") == 2
    assert "error: vocab.json is missing: run prepare.py (" in capfd.readouterr().err
    cycle = ("--model.lr_scheduler=OneCycleLR", "--model.lr_scheduler.max_lr=0.3")
    with pytest.raises(ValueError, match=r"^no list of files"):
        main(*run, "--data=own_code.NoList", *cycle)
    assert main(*run, "--model=own_code.Lacks", "--model.start_token=<s>", "--print_config") == 0


@pytest.mark.parametrize(
    ("option", "is_secret"),
    [
        *(("start_token=<s>", False), ("eos_token=<|endoftext|>", False), ("image_token=", False)),
        *(("hf_token=hf_AbCdEfGhIjKlMnOp", True), ("token=hunter2", True), ("a_secret=x", True)),
        *(("access_token=hunter2", True), ("OPENAI_API_KEY=x", True), ("max_tokens=9", False)),
    ],
)
def test_which_options_are_secrets(option: str, is_secret: bool) -> None:
    name, _, value = option.partition("=")
    with pytest.raises(UsageError, match="a secret") if is_secret else nullcontext():
        check_secrets(Namespace(model=Namespace({name: value})))


def test_errors_of_torch_and_of_devices_keep_their_traceback() -> None:
    """The last frame of their traceback may be this package's, which has called torch."""
    with pytest.raises(RuntimeError, match="must match the size"), one_line_errors(False):
        textbook_allreduce([torch.ones(2), torch.ones(3)])
    full = torch.OutOfMemoryError("CUDA out of memory")
    asserted = torch.AcceleratorError("CUDA error: device-side assert triggered")
    for error, advice in ((full, "smaller batch size"), (asserted, "CUDA_LAUNCH_BLOCKING=1")):
        with pytest.raises(type(error)), one_line_errors(False):
            raise error
        assert [advice in note for note in error.__notes__] == [True]


def test_ctrl_c_outside_training(
    main: Callable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """In training Lightning handles it."""

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_trainer, "TrainingCLI", interrupted)
    assert main("fit") == 130 and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("variables", "options", "told"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "4"}, (), "ddp 2 2"),
        (SLURM, (), "ddp 2 1"),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, (), "auto auto 1"),
        (TORCHRUN, ("--trainer.devices=1",), "devices=1 --trainer.num_nodes=1 does not join them"),
        (
            TORCHRUN,
            ("--trainer.devices=1", "--trainer.num_nodes=2"),
            "started (torchrun, SLURM, MPI), 2",
        ),
        (TORCHRUN, ("--trainer.num_nodes=2",), "--trainer.num_nodes=2 does not"),
        (TORCHRUN, ("--trainer.strategy=manual_allreduce",), "manual_allreduce 2 1"),
        (TORCHRUN, ("--trainer.strategy=dp",), "does not join them"),
        (TORCHRUN, ("--trainer.strategy=ddp_spawn",), "does not join them"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, (), "does not join them"),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, ("--trainer.devices=2",), "1 process(es) were started"),
    ],
)
def test_a_launchers_processes_train_one_model(
    variables: dict[str, str],
    options: tuple[str, ...],
    told: str,
    main: Callable,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`auto` is `ddp` over all of them; what would be several models ends before it trains."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    taken: list[Any] = []

    def stop_before_training(best: Any, seed: int, config: dict[str, Any]) -> None:
        taken.append(config["trainer"])
        sys.exit(0)

    monkeypatch.setattr(run_trainer, "LastCheckpoint", stop_before_training)
    status = main("fit", CPU, *options)
    for trainer in taken:
        assert f"{trainer['strategy']} {trainer['devices']} {trainer['num_nodes']}" == told
    err = capfd.readouterr().err
    assert (status == 0) == bool(taken) and (taken or (told in err and err.count("error:") == 1))
