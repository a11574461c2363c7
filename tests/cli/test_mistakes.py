"""The commonest mistakes end in at most six lines with status 2, and leave no file."""

import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import DistStoreError

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.cli.errors import one_line_errors
from lightning_mgpu.cli.main import main as command_line
from lightning_mgpu.cli.training_cli import TrainingCLI
from lightning_mgpu.distributed.processes import PeerFailure
from lightning_mgpu.runs.directory import read_run_json
from lightning_mgpu.tools import UsageError

CPU = "--trainer.accelerator=cpu"
SMALL = f"{CPU} --trainer.devices=1 --data.source=synthetic --run_dir=a"
MISTAKES = {  # a command line, and what its lines must say
    "fitt": ("no subcommand 'fitt': use fit, validate, test, predict, ",),
    "fit --trainer.devcies=2": ("--trainer.devcies=2", "did you mean --trainer.devices?"),
    "fit --batch_size=3": ("did you mean --data.batch_size?",),
    "fit --model=ResNet18 --model.widht=3": ("=3:", "did you mean --model.width?"),
    "fit --trainer.strategy=manual_allreduce --trainer.strategy.replica=2": (
        *("--trainer.strategy.replica=2", "did you mean --trainer.strategy.replicas?"),
    ),
    "fit --model.optimizer=SGD --model.optimizer.momentun=1": ("--model.optimizer.momentum?",),
    "fit --config key.yaml": ("--trainer.max_epoch", "did you mean --trainer.max_epochs?"),
    "fit --model=LeNot": ("--model=LeNot", "LeNet (default), ResNet18, or a path: my_package."),
    "fit --model=nowhere.Net": ("--model=nowhere.Net", "No module named 'nowhere'"),
    "fit --model.lr_scheduler=StepLR": ("step_size; add --model.lr_scheduler.step_size=VALUE (",),
    "fit --model.lr_scheduler=own_schedule.Decay": (
        *(
            "--model.lr_scheduler.total_steps=VALUE",
            "a default, which is replaced by the",
        ),
    ),
    "fit --config optimizer.yaml": ("--optimizer=torch.optim.AdamW", "mean --model.optimizer?"),
    "fit --config fit.yaml": ("--fit.trainer.max_epochs=1", "did you mean --trainer.max_epochs?"),
    "fit --config old_name.yaml": (
        "--trainer.callbacks.0=pytorch_lightning.callbacks.EarlyStopping: use lightning.pytorch",
    ),
    "fit --checkpoint.save_last=true": ("the last epoch is always saved, in last.ckpt",),
    "fit --trainer.strategy=ddp --trainer.strategy.timeout=0:00:00": (
        "--trainer.strategy.timeout=0:00:00: must be a positive time",
    ),
    "fit --run_dir=a\0b": ("an argument contains a NUL",),
    f"fit {SMALL} --trainer.val_check_interval=1000": (
        "error: `val_check_interval` (1000) must be",
    ),
    "fit --data.batch_size=many": ("--data.batch_size=many: Expected a <class 'int'> (",),
    "fit --model.lr=nan": ("--model.lr=nan: Expected a <class 'float'> (",),
    "fit --trainer.precision=17": ("--trainer.precision=17", "bf16-mixed"),
    "fit --trainer.strategy=dpp": ("dpp: no such strategy", "did you mean dp?", "my_package."),
    "fit --config=model/resnet.yaml": ("--config=model/resnet.yaml: no such file in . or",),
    "fit --config number.yaml": ("--wandb.name=7795000000000.0: Expected a <class 'str'> (",),
    "fit --config broken.yaml": ("broken.yaml cannot be read as YAML: ",),
    "fit --config twice.yaml": ("duplicate key trainer in lines 1 and 3: remove one",),
    "fit --config bomb.yaml": ("bomb.yaml", "more than 100000 values: are aliases recursive?"),
    "fit --config=nul.yaml": ("line 1 contains a NUL",),
    "test --ckpt_path=": ("--ckpt_path= is empty",),
    "fit --config empty.yaml": ("--run_dir= is empty",),
    "test --ckpt_path nope.ckpt": ("nope.ckpt: no such file",),
    "test --ckpt_path text.ckpt --model=LeNet": ("text.ckpt cannot be read: damaged",),
    "test --ckpt_path=a.ckpt --weights=b.ckpt": ("--weights: --ckpt_path contains the weights",),
    "fit --run_dir=used": ("--run_dir=used exists and is not empty",),
    "fit --resume=nowhere": ("--resume=nowhere",),
    "fit --resume": ("--resume: no run given: use --resume=last or",),
    f"fit {SMALL} --model=lightning.pytorch.demos.boring_classes.BoringModel": (
        "The model defines train_dataloader, which --data would override",
    ),
    "fit --trainer.accelerator=gpu": ("No supported gpu backend found",),
    "fit --trainer.devices=two": ("--trainer.devices=two: use a number",),
    "fit --config=experiment/lenet_fast.yaml": ("No module named 'timm': pip install timm",),
    f"fit {SMALL} --trainer.strategy=manual_allreduce --trainer.strategy.allreduce=math.fsum": (
        "allreduce math.fsum of 1 tensors raised ValueError",
    ),
    f"fit {SMALL} --output.test=false --data.val_size=0": (
        "--output.test=false: the data module val",
    ),
    "fit --resume=cut": ("cut/config.yaml contains no data.class_path: truncated",),
    "runs cut": ("metrics.csv is not a CSV file", "move it away"),
    "runs nowhere": ("nowhere: contains no run",),
}
FILES = {
    "used/a_file": "",
    "broken.yaml": "trainer: [1, {\n",
    "number.yaml": "wandb: {name: 77950e8}\n",
    "cut/config.yaml": "model: {class_path: LeNet}\ndata:\n",
    "cut/run.json": "[1]",
    "cut/metrics.csv": "step\n\xff\n",
    "twice.yaml": "trainer: {max_epochs: 1}\nmodel: {}\ntrainer: {devices: 1}\n",
    "nul.yaml": 'run_dir: "a\\0b"\n',
    "bomb.yaml": "a0: &0 [1]\n"
    + "".join(f"a{i + 1}: &{i + 1} [{', '.join(9 * [f'*{i}'])}]\n" for i in range(9)),
    "empty.yaml": "run_dir: ''\n",
    "key.yaml": "trainer: {max_epoch: 2}\n",
    "optimizer.yaml": "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1}}\n"
    "model: {class_path: LeNet, init_args: {optimizer: torch.optim.SGD}}\n",
    "fit.yaml": "fit: {trainer: {max_epochs: 1}}\n",
    "old_name.yaml": "trainer: {callbacks: [{class_path: pytorch_lightning.callbacks.EarlyStopping,"
    " init_args: {monitor: val_loss}}]}\n",
    "own_schedule.py": "from torch.optim.lr_scheduler import LambdaLR\n"
    "class Decay(LambdaLR):\n    def __init__(self, optimizer, total_steps: int): ...\n",
    "text.ckpt": "a text",
    "timm.py": "raise ModuleNotFoundError(\"No module named 'timm'\")",
}


@pytest.fixture
def here(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="latin-1")
    return tmp_path


@pytest.mark.parametrize("args", MISTAKES)
def test_mistake_ends_in_a_few_lines(args, here, main, capfd, monkeypatch):
    if "gpu" in args and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    before = sorted(here.glob("*"))
    assert main(*args.split()) == 2
    err = capfd.readouterr().err
    _, _, lines = err.partition("error: ")
    assert lines.count("\n") <= 6 and "Traceback" not in err, err
    assert all(words in f"error: {lines}" for words in MISTAKES[args]), err
    assert [path for path in sorted(here.glob("*")) if "cache" not in path.name] == before


OWN = """
from lightning_mgpu.models import LeNet

class Broken(LeNet):
    def __init__(self) -> None:
        {}["a defect"]

class Picky(LeNet):
    def __init__(self, width: int = 3) -> None:
        raise ValueError(f"model.width={width}: take an even number")

class Late(LeNet):
    def training_step(self, batch, batch_idx):
        raise ValueError("a defect")
"""


def test_code_of_ones_own(main, root, tmp_path, capfd):
    """A constructor's ValueError is a mistake; what else its code raises keeps its traceback."""
    (tmp_path / "own_code.py").write_text(OWN)
    run = ("fit", f"--data.root={root}", "--data.val_size=9", CPU, "--trainer.devices=1")
    assert main(*run, "--model=own_code.Picky") == 2
    assert "error: model.width=3: take an even number" in capfd.readouterr().err
    with pytest.raises(Exception, match="take an even number"):
        main(*run, "--model=own_code.Picky", "--traceback")
    with pytest.raises(KeyError, match="a defect") as caught:
        main(*run, "--model=own_code.Broken")
    # without jsonargparse's wrapping
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    with pytest.raises(ValueError, match="a defect"):
        main(*run, "--model=own_code.Late", "--run_dir=late")
    end = read_run_json(tmp_path / "late")["end"]
    assert end["state"] == "failed" and "ValueError: a defect" in end["why"]
    assert "raise ValueError" in (tmp_path / "late" / "error.log").read_text()


def test_an_error_without_a_text_and_with_control_characters(capsys):
    for error in (UsageError(" \n"), UsageError("\x1b[31mred\x07")):
        with pytest.raises(SystemExit), one_line_errors(False):
            raise error
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["error: UsageError", "error: ?[31mred?"]


@pytest.mark.parametrize("cli", [7, "cli", int])
def test_a_command_line_of_ones_own_is_a_subclass(cli, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "fit"])
    for name in ("path", "meta_path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setattr("lightning_mgpu.runs.record.stop_on_signals", lambda: None)
    monkeypatch.setattr("lightning_mgpu.cli.main.hide_messages", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        command_line(cli)
    assert f"error: main(cli={cli!r}): must be a subclass of Tra" in capsys.readouterr().err


def test_an_error_of_torchs_code_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="must match"), one_line_errors(False):
        textbook_allreduce([torch.ones(2), torch.ones(3)])


def test_a_launchers_processes_train_one_model(main, capfd, monkeypatch):
    """One process under a launcher that has started two would train two models."""
    for name in ("RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=2", "TORCHELASTIC_RUN_ID=1"):
        monkeypatch.setenv(*name.split("="))
    assert main("fit", CPU, "--trainer.devices=1", "--trainer.strategy=manual_allreduce") == 2
    err = capfd.readouterr().err
    assert "2 processes train separately: use --trainer.strategy=ddp" in err


def test_untrained_weights_are_told(main, root):
    one = (f"--data.root={root}", "--data.val_size=9", CPU, "--trainer.devices=1")
    with pytest.warns(UserWarning, match="test without --ckpt_path: the weights are untrained"):
        assert main("test", *one) == 0


def test_a_process_that_has_no_reason_says_nothing(monkeypatch, capsys):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    strategy = SimpleNamespace(global_rank=1, _timeout=timedelta(seconds=12))
    cli = SimpleNamespace(method="test", trainer=SimpleNamespace(strategy=strategy))
    late = DistStoreError("wait timeout after 12000ms, keys: /default_pg/0//cpu//0/0")
    for error in (PeerFailure("process 0 has ended"), late, UsageError("a mistake")):
        with pytest.raises(SystemExit, match="2"), one_line_errors(False):
            raise TrainingCLI.describe_end(cli, error)
    late_line, mistake = capsys.readouterr().err.splitlines()
    assert late_line.startswith("error: [process 1] waited 12 s (`timeout`) for process 0; start")
    assert mistake == "error: [process 1] a mistake (--traceback shows where)"
