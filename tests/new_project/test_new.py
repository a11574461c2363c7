"""`new` writes a project that depends on this package, and trains, tests and sweeps with it."""

import re
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu.new_project import cli

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("projects") / "stars"
    cli.new_command([str(target)])
    return target


def test_its_files_have_its_name(tmp_path: Path) -> None:
    cli.new_command([str(target := tmp_path / "stars")])
    texts = {
        str(path.relative_to(target)): path.read_text()
        for path in target.rglob("*")
        if path.is_file()
    }
    parts = {f"stars/{name}.py" for name in ("__init__", "__main__", "model", "data")}
    settings = {"pyproject.toml", ".gitignore", "configs/default.yaml", ".github/workflows/ci.yml"}
    assert {*parts, *settings, "README.md", "tests/test_stars.py"} < {*texts} and len(texts) < 14
    assert "my_project" not in "".join(texts.values())
    assert f'"lightning-mgpu[sweep] @ {REPOSITORY.as_uri()}"' in texts["pyproject.toml"]
    assert texts["README.md"].count("\n") <= 30


def test_its_package_comes_from_any_address(main: Callable[..., int], tmp_path: Path) -> None:
    address = "git+https://example.org/my_project.git"  # holds a word of the template
    assert main("new", "deep/stars", f"--from={address}") == 0
    assert f"[sweep] @ {address}" in (tmp_path / "deep/stars/pyproject.toml").read_text()


@pytest.fixture
def stars(
    project: Path, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> Callable[..., tuple[int, str]]:
    """`python -m stars` in this process, in the project's directory; status and output."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{project}")
    import_module("stars")

    def run(*args: str) -> tuple[int, str]:
        capfd.readouterr()
        status = main(*args, package="stars")
        return status, "".join(capfd.readouterr())

    return run


@pytest.fixture
def command(project: Path, command_in: Callable[[Path], Any]) -> Iterator[Any]:
    """Processes in the project's directory."""
    command = command_in(project)
    command.env["PYTHONPATH"] = f"{REPOSITORY}:{project}"
    yield command
    command.end()


SAYS = {
    "--help": "python -m stars fit --resume=last",
    "fit --help": "usage: python -m stars fit",
    "fit --help ": "(default: MyModel)",
    "fit --help.all": "usage: python -m stars fit",
    "fit --model.help": "--model.width",
    "fit --print_config": "class_path: stars.MyModel",
    "fit --model=LeNet --print_config": "class_path: lightning_mgpu.models.LeNet",
    "fit --model=MyModle": "did you mean MyModel?",
    "fit --trainer.max_epoch=3": "did you mean --trainer.max_epochs?",
    "fit --config sweep/learnin_rate.yaml": "did you mean sweep/learning_rate.yaml?",
    "fit --config experiment/lenet_book.yaml --print_config": "lightning_mgpu.models.LeNet",
    "sweep --help": "python -m stars sweep --config",
    "export --help": "python -m stars export --ckpt_path",
    "runs --help": "python -m stars runs --csv",
}


def test_the_command_line_is_its_own(stars: Callable[..., tuple[int, str]]) -> None:
    for line, expected in SAYS.items():
        status, output = stars(*line.split())
        assert expected in output, line
        assert status == (2 if "did you mean" in expected else 0), line


@pytest.mark.slow
def test_it_trains_resumes_and_exports(
    project: Path, command: Any, stars: Callable[..., tuple[int, str]]
) -> None:
    run_dir = project / "runs" / "first"
    options = ("--trainer.accelerator=cpu", "--trainer.devices=2", "--run_dir=runs/first")
    process = command.start("fit", "--trainer.strategy=ddp", *options, launcher=("-m", "stars"))
    while not (run_dir / "checkpoints" / "last.ckpt").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.terminate()
    _, out, _ = command.finish(process, timeout=60)
    assert "stopped; go on with: python -m stars fit --resume=runs/first" in out
    status, out = stars("fit", "--resume=last", "--trainer.max_epochs=3", "--trainer.strategy=dp")
    assert status == 0 and "epoch 3/3" in out and "epoch 1/3" not in out
    status, out = stars("export", "--ckpt_path=runs/first/checkpoints/last.ckpt", "--output=a.pt2")
    assert status == 0 and "MyModel, batches of any size" in out
    assert "names classes of other files" not in out  # they are its own


TEST_OF_ITS_OWN_SGD = """
import pytest
import torch
from lightning_mgpu.cli.main import main

class SGD(torch.optim.SGD):
    __module__ = "stars"

def test_own_class_goes_before_torchs(monkeypatch, capsys):
    monkeypatch.setattr("stars.SGD", SGD, raising=False)
    monkeypatch.setattr("sys.argv", ["", "fit", "--model.optimizer=SGD", "--print_config"])
    with pytest.raises(SystemExit):
        main(package="stars")
    assert "class_path: stars.SGD" in capsys.readouterr().out
"""


@pytest.mark.slow
def test_its_tests_pass_and_it_sweeps(
    project: Path, command: Any, stars: Callable[..., tuple[int, str]]
) -> None:
    (project / "tests" / "test_sgd.py").write_text(TEST_OF_ITS_OWN_SGD)
    process = command.start("-q", launcher=("-m", "pytest"))
    status, out, err = command.finish(process, timeout=200)
    assert status == 0 and "4 passed" in out, out + err
    options = ("--count=1", "--trainer.max_epochs=1", "--trainer.accelerator=cpu")
    status, out = stars("sweep", "--config=sweep/learning_rate.yaml", *options)
    assert status == 0 and "trial_000: val_acc " in out, out
    assert "MyModel" in (project / "sweeps/learning_rate/trial_000.log").read_text()


REFUSED = {
    "there": "it exists",
    "my-project": "my-project is not a name for a package",
    "torch": "Python has a package torch already",
    "not_there_yet --from ../clone": "give the URL that pip installs lightning-mgpu from",
    "file/not_there_yet": "cannot be written: Not a directory",
    "not_there_yet --drop=sweep": "--drop",
}


def test_refused(
    main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    for args, reason in REFUSED.items():
        assert main("new", *args.split()) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and reason in err and err.count("\n") == 1
    monkeypatch.setattr(cli, "CLONE", tmp_path)  # as where pip has installed a copy
    assert (
        main("new", "not_there_yet") == 2 and "new --from=: give the URL" in capfd.readouterr().err
    )
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file"}


def test_the_readme_makes_such_a_project() -> None:
    [block] = re.findall("<!-- run: own -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    [name] = re.findall(r"^python -m lightning_mgpu new \.\./(\w+)$", block, flags=re.MULTILINE)
    assert re.search(rf"^python -m {name} fit ", block, flags=re.MULTILINE)
