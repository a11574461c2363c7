"""Settings of a stranger's: classes are made where a type names one, and nothing else is called."""

import json

import pytest
import torch

OWN = """
from collections.abc import Callable
from typing import Any

from torch.optim import SGD

from lightning_mgpu.models import LeNet

class Mine(SGD):
    pass

def double(x: int) -> int:
    return 2 * x

class Net(LeNet):
    def __init__(
        self,
        bare=None,
        anything: Any = None,
        function: Callable | None = None,
        typed: Callable[[int], int] | None = None,
        nested: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
"""
SHELL = {"class_path": "os.system", "init_args": {"command": "touch called"}}
OUTPUT = {"class_path": "subprocess.getoutput", "init_args": {"cmd": "touch called"}}
PYTHON = {"class_path": "builtins.exec", "init_args": {"source": "open('called', 'w')"}}
CALLBACK = '[{"class_path": "LambdaCallback", "init_args": {"on_fit_start": X}}]'
ERRORS = {  # a flag with a function for X, and the place that the message names
    "--model.bare=X": ("model.bare", SHELL),
    "--model.anything=X": ("model.anything", OUTPUT),
    "--model.function=X": ("model.function", PYTHON),
    "--model.typed=X": ("model.typed", SHELL),
    '--model.nested=[{"a": [X]}]': ("model.nested.0.a.0", PYTHON),
    "--model.optimizer=X": ("model.optimizer", SHELL),
    f"--trainer.callbacks={CALLBACK}": ("trainer.callbacks.0.on_fit_start", PYTHON),
}
QUICK = (
    "--model=strange.Net",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.fast_dev_run=true",
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "strange.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("flag", ERRORS)
def test_a_function_is_never_called(flag, here, main, capfd):
    option, value = ERRORS[flag]
    args = (*QUICK, "--data.source=synthetic", "--run_dir=run")
    assert main("fit", *args, flag.replace("X", json.dumps(value))) == 2
    hint = f"error: --{option}={value['class_path']}: class_path must be a class"
    assert hint in capfd.readouterr().err
    assert not (here / "called").exists() and not (here / "run").exists()


def test_a_class_is_made_only_where_a_type_names_one(here, root, main):
    command = {
        "class_path": "subprocess.Popen",
        "init_args": {"args": "echo > called", "shell": True},
    }
    args = (f"--data.root={root}", "--data.val_size=9", *QUICK)
    assert main("fit", *args, f"--model.anything={json.dumps(command)}") == 0
    assert not (here / "called").exists()


@pytest.mark.parametrize(
    "line",
    [
        *("fit --config=a/config.yaml", "fit --resume=a", "fit --weights=a/checkpoints/a.ckpt"),
        *(f"{name} --ckpt_path=a/checkpoints/a.ckpt" for name in ("test", "predict", "validate")),
    ],
)
def test_a_strangers_run_directory(line, here, main, capfd):
    model = {"class_path": "lightning_mgpu.models.LeNet", "init_args": {"optimizer": SHELL}}
    (here / "a" / "checkpoints").mkdir(parents=True)
    data = {"class_path": "lightning_mgpu.data.FashionMNIST"}
    config = {"seed_everything": 1, "model": model, "data": data}
    (here / "a" / "config.yaml").write_text(json.dumps(config))
    (here / "a" / "run.json").write_text("{}")
    content = {"state_dict": {}, "pytorch-lightning_version": "2.6.0"}
    torch.save(content, here / "a" / "checkpoints" / "a.ckpt")
    assert main(*line.split()) == 2
    assert "optimizer=os.system: class_path must be a class" in capfd.readouterr().err
    assert not (here / "called").exists()


EVIL = "open('called', 'w')\nfrom strange import Net\n"
RUN = "runs/strange"


@pytest.fixture
def evil(here, root, main):
    """A run directory with a Python file, which its configuration names."""
    args = (f"--data.root={root}", "--data.val_size=9", *QUICK[:-1], "--trainer.max_epochs=1")
    assert main("fit", *args, "--trainer.limit_train_batches=1", f"--run_dir={RUN}") == 0
    (here / RUN / "evil").mkdir()
    (here / RUN / "evil" / "__init__.py").write_text(EVIL)
    (here / "link").symlink_to(f"{RUN}/evil")

    def name(module):
        path = here / RUN / "config.yaml"
        path.write_text(path.read_text().replace("strange.Net", f"{module}.Net"))

    return name


@pytest.mark.parametrize(
    ("module", "line"),
    [
        *((name, f"fit --resume={RUN}") for name in ("runs.strange.evil", "link", "evil")),
        *(("link", f"fit {each}") for each in (f"--config={RUN}/config.yaml", "--resume=last")),
        ("link", f"fit --weights={RUN}/checkpoints/last.ckpt"),
        ("link", f"test --ckpt_path={RUN}/checkpoints/last.ckpt"),
    ],
)
def test_code_in_a_run_directory_does_not_run(module, line, evil, here, main, capfd, monkeypatch):
    """Under its name, by a link, or where the working directory is the run's."""
    evil(module)
    if module == "evil":
        monkeypatch.syspath_prepend(here / RUN)
    capfd.readouterr()
    assert main(*line.split()) == 2
    err = capfd.readouterr().err
    assert "/__init__.py does not run: only the command line may name code in a run" in err
    assert err.count("\n") == 1 and not (here / "called").exists()


def test_code_that_the_command_line_names_runs(evil, here, main):
    (here / "package" / "runs").mkdir(parents=True)
    (here / "package" / "runs" / "code.py").write_text("from strange import Net\n")
    test = ("test", f"--ckpt_path={RUN}/checkpoints/last.ckpt")
    assert main(*test, "--model=package.runs.code.Net", "--run_dir=a") == 0
    evil("runs.strange.evil")
    assert main(*test, "--model", "runs.strange.evil.Net", "--run_dir=b") == 0
    assert (here / "called").exists()
