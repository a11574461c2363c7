"""Every file and every command of docs/adding.md and of the README's own allreduce, as printed.

Only the limits of a short run are appended. The commands of directories that can be deleted are
tried by their own tests.
"""

import csv
import os
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
import torch
from torchmetrics.classification import MulticlassF1Score

from lightning_mgpu.cli.main import main as run_command_line
from tests import conftest
from tests.strategies.conftest import run_in_processes

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
OWN = (REPOSITORY / "README.md").read_text().partition("\n## Your own allreduce\n")[2]
SECTION = (REPOSITORY / "docs" / "adding.md").read_text() + OWN.partition("\n## ")[0]
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", SECTION, flags=re.DOTALL))
RUNS = re.findall("^python -m lightning_mgpu fit .*", SECTION, flags=re.MULTILINE)
[DIFF] = re.findall(r"```diff\n(.*?)```", SECTION, flags=re.DOTALL)
CPU = "--trainer.accelerator=cpu"
SHORT = (CPU, "--data.source=synthetic", "--trainer.max_epochs=1")
LIMITS = tuple(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))
ONE_PROCESS = ("--trainer.devices=1",)  # others take seconds to start


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, content in FILES.items():
        (tmp_path / name).write_text(f"# {name}\n{content}")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def options_of(part: str) -> list[str]:
    """The arguments of the one `fit` that names a file of the page."""
    [line] = [line for line in RUNS if part in line]
    return shlex.split(line)[3:]


def epochs(run_dir: Path) -> list[tuple[float, ...]]:
    """Loss and accuracy of training and validation, one row per epoch."""
    rows = list(csv.DictReader((run_dir / "metrics.csv").open()))
    names = ("train_loss", "train_acc", "val_loss", "val_acc")
    return list(zip(*([float(row[name]) for row in rows if row[name]] for name in names)))


@pytest.mark.parametrize("part", ["my_model.MLP --model.hidden=64", "my_allreduce"])
def test_its_command_trains(part, project, main, capfd):
    options = options_of(part)
    if "my_model" in part:
        options += ["--trainer.strategy=manual_allreduce"]
    assert main(*options, *ONE_PROCESS, *SHORT, *LIMITS) == 0
    out = capfd.readouterr().out
    assert "epoch 1/1" in out and "256 per replica" in out
    # the checkpoint in its run directory says which model it is
    (path,) = project.glob("runs/*/checkpoints/last.ckpt")
    assert main("test", f"--ckpt_path={path}", CPU, "--data.source=synthetic", *LIMITS) == 0


def run_lines(directory: Path, *lines: list[str]) -> str:
    """Command lines in one of several processes; what they print."""
    os.chdir(directory)
    os.environ["WANDB_MODE"] = "disabled"
    with redirect_stdout(StringIO()) as out:
        for args in lines:
            sys.argv = ["lightning_mgpu/__main__.py", *args]
            run_command_line()
    return out.getvalue()


def test_a_dataset_trains_alike_everywhere(project, main):
    """In two processes, under ddp and manual_allreduce, it learns what it learns on one device."""
    ddp = [*options_of("my_data"), CPU, "--run_dir=ddp"]
    manual = [*ddp, "--trainer.strategy=manual_allreduce", "--run_dir=manual"]
    out = run_in_processes(2, run_lines, project, ddp, manual)[0]
    assert out.count("batch:    100 global, 50 per replica") == 2, out
    assert "MLP, 50,890 parameters" in out
    assert main(*ddp, "--trainer.devices=1", "--run_dir=one") == 0
    expected = epochs(project / "one")
    assert len(expected) == 2 and expected[1][3] > 0.9, "it learns"
    for name in ("ddp", "manual"):
        for row, other in zip(expected, epochs(project / name), strict=True):
            assert other == pytest.approx(row, rel=1e-4), name


def test_a_text_model_learns_and_predicts(project, main):
    """From dicts; its F1 score is that of its predictions."""
    assert main(*options_of("my_text.TextClassifier"), CPU, *ONE_PROCESS) == 0
    path = next((project / "runs/text/checkpoints").glob("epoch=*"))
    assert main("predict", f"--ckpt_path={path}", CPU, "--run_dir=p") == 0
    table = list(csv.DictReader((project / "p" / "predictions.csv").open()))
    assert len(table) == 500 and {row["class"] for row in table} == {"food", "sport", "weather"}
    found, y = (torch.tensor([int(row[key]) for row in table]) for key in ("prediction", "label"))
    rows = csv.DictReader((project / "runs/text/metrics.csv").open())
    [f1] = [float(row["test_f1"]) for row in rows if row["test_f1"]]
    assert f1 == pytest.approx(float(MulticlassF1Score(3)(found, y))) and f1 > 0.9


def test_a_link_between_data_and_model(project, main, monkeypatch):
    own = runpy.run_path(str(project / "my_cli.py"))
    monkeypatch.setattr(conftest, "run_command_line", partial(own["main"], cli=own["MyCLI"]))
    quadrants = import_module("my_data").Quadrants
    monkeypatch.setattr(quadrants, "num_classes", 4, raising=False)  # ten are the default
    assert main("fit", "--data=my_data.Quadrants", *SHORT[::2], *LIMITS, "--run_dir=a") == 0
    assert main("fit", "--resume=a", "--trainer.max_epochs=2") == 0
    assert torch.load("a/checkpoints/last.ckpt")["state_dict"]["net.9.bias"].shape == (4,)


def test_a_loss_per_token(project, main, capfd):
    options = (*ONE_PROCESS, CPU, "--trainer.max_epochs=2")
    assert main(*options_of("my_language_model"), *options) == 0
    assert re.search(r"  loss_per_token 1\.", capfd.readouterr().out), "it learns: 2.4 is chance"


def test_a_plain_lightning_module(main, capfd):
    """Lightning's own, with plain loaders."""
    boring = "lightning.pytorch.demos.boring_classes.Boring"
    parts = (f"--model={boring}Model", f"--data={boring}DataModule", "--trainer.max_epochs=1")
    strategy = ("--trainer.strategy=manual_allreduce", *ONE_PROCESS)
    assert main("fit", *parts, CPU, *LIMITS, *strategy) == 0
    assert "model:    BoringModel, 66 parameters" in capfd.readouterr().out


def patched(script: str) -> str:
    """The plain script, with the page's diff applied."""
    for hunk in DIFF.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(x[1:] for x in lines if x[0] in kept) for kept in (" -", " +"))
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


def run_script(path: Path) -> float:
    """A plain script in one of several processes; the loss in its last validation."""
    os.chdir(path.parent)
    names = runpy.run_path(str(path), run_name="__main__")
    return float(names["trainer"].callback_metrics["val_loss"])


def test_a_plain_script_before_and_after(project):
    """It trains under ddp. With the page's diff, it learns what it learns on one device."""
    before, after, one = (project / name for name in ("my_plain.py", "after.py", "one.py"))
    after.write_text(patched(before.read_text()))
    one.write_text(after.read_text().replace("devices=2", "devices=1"))
    assert run_in_processes(2, run_script, before)[0] < 0.2, "it learns: 1.0 is chance"
    [expected] = run_in_processes(1, run_script, one)
    assert run_in_processes(2, run_script, after) == pytest.approx([expected] * 2, rel=1e-4)
