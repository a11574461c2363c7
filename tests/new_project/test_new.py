"""`new` writes a project that depends on this package, and trains, tests and sweeps with it."""

import re
import runpy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_mgpu import __version__
from lightning_mgpu.new_project import cli
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    target = tmp_path_factory.mktemp("projects") / "stars"
    cli.new_command([str(target)])
    return target


def test_its_files_have_its_name(project, main, tmp_path, capfd):
    files = [path for path in project.rglob("*") if path.is_file() and "cache" not in str(path)]
    texts = {str(path.relative_to(project)): path.read_text() for path in files}
    parts = {f"stars/{name}.py" for name in ("__init__", "__main__", "model", "data")}
    settings = {"pyproject.toml", ".gitignore", "configs/default.yaml", ".github/workflows/ci.yml"}
    assert {*parts, *settings, "README.md", "tests/test_stars.py"} < {*texts} and len(texts) < 14
    assert "my_project" not in "".join(texts.values())
    assert f'"lightning-mgpu[sweep]>={__version__}"' in texts["pyproject.toml"]
    assert "file://" not in "".join(texts.values())  # it would replace an editable installation
    ci = ".github/workflows/ci.yml"
    assert "@ git+https://github.com/OWNER/lightning_mgpu" in texts[ci]
    address = "git+https://example.org/my_project.git"  # holds a word of the template
    assert main("new", "deep/stars", f"--from={address}") == 0
    assert f"[sweep] @ {address}" in (tmp_path / "deep/stars" / ci).read_text()
    assert f'pip install "lightning-mgpu[sweep] @ {address}"' in capfd.readouterr().out


@pytest.fixture
def stars(project, main, monkeypatch, capfd):
    """`python -m stars` in this process, in the project's directory; status and output."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{project}")
    import_module("stars")

    def run(*args):
        capfd.readouterr()
        status = main(*args, package="stars")
        return status, "".join(capfd.readouterr())

    return run


SAYS = {
    "--help": "python -m stars fit --resume=last",
    "fit --help": "usage: python -m stars fit",
    "fit --model.help": "--model.width",
    "fit --print_config": "class_path: stars.MyModel",
    "fit --print_config --trainer.max_epochs=3": "log_every_n_steps: 10",  # this package's
    "fit --model=LeNet --print_config": "class_path: lightning_mgpu.models.LeNet",
    "fit --trainer.max_epoch=3": "did you mean --trainer.max_epochs?",
    "fit --config sweep/learnin_rate.yaml": "no such file in . or",
    "fit --config experiment/lenet_book.yaml --print_config": "lightning_mgpu.models.LeNet",
    "runs --help": "python -m stars runs --csv",
}
if find_spec("lightning_mgpu.sweep"):  # which can be deleted
    SAYS["sweep --help"] = "python -m stars sweep --config"
FEW = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--data.num_train=1000")


def test_the_command_line_is_its_own(stars):
    for line, expected in SAYS.items():
        status, output = stars(*line.split())
        assert expected in output, line
        assert status == (2 if re.search("did you mean|no such", expected) else 0), line


@pytest.mark.slow
def test_it_trains_and_resumes(project, stars, tmp_path):
    """Its own tests train it in a process of its own; all else runs in this one."""
    tests = runpy.run_path(str(project / "tests" / "test_stars.py"))
    tests["test_model_output_shape"]()
    tests["test_epoch_contains_every_sample_once"]()
    tests["test_fit_learns"](tmp_path / "learns")
    status, out = stars("fit", *FEW, "--run_dir=runs/first", "--trainer.max_epochs=1")
    assert status == 0 and "data:     MyData 1,000 train, 1,000 val, 1,000 test" in out
    status, out = stars("fit", "--resume=last", "--trainer.max_epochs=2")
    assert status == 0 and "epoch 2/2" in out and "epoch 1/2" not in out
    assert stars("predict", "--ckpt_path=runs/first/checkpoints/last.ckpt", "--run_dir=p")[0] == 0
    assert "p(row 9)" in Path("p/predictions.csv").read_text()


@pytest.mark.slow
def test_it_sweeps(main, stars, monkeypatch):
    pytest.importorskip("lightning_mgpu.sweep")  # it can be deleted

    def run_here(command, log):
        assert command[1:3] == ["-m", "stars"]
        return main(*command[3:], package="stars")

    monkeypatch.setattr("lightning_mgpu.sweep.run_in_group", run_here)
    status, out = stars("sweep", "--config=sweep/learning_rate.yaml", "--count=1", *FEW)
    assert status == 0 and "trial_000: val_acc " in out, out


ERRORS = {
    "there": "there exists",
    "my-project": "my-project is not a valid package name",
    "class": "class is not a valid package name",
    "torch": "a package torch exists already",
}


def test_refused(main, tmp_path, capfd):
    (tmp_path / "there").mkdir()
    for name, reason in ERRORS.items():
        assert main("new", name) == 2
        assert reason in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
