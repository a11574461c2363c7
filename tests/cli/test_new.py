"""`new` makes a copy with another name, without rooms that can go, that trains and tests itself."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu.cli import new

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
HELP_TRAIN_AND_COLLECT = """
import sys
from my_project.__main__ import main
run = "--trainer.fast_dev_run=true --trainer.accelerator=cpu --trainer.devices=1"
for sys.argv[1:] in ["--help"], ["fit", "--data.source=synthetic", *run.split()]:
    main()
import pytest
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider"]))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without all that can go."""
    target = tmp_path_factory.mktemp("projects") / "my_project"
    new.main([str(target), "--drop", *new.ROOMS])
    return target


def test_no_old_name_and_no_room_is_left(copy: Path) -> None:
    files = {
        str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()
    }
    assert {
        "pyproject.toml",
        "my_project/cli/main.py",
        "configs/default.yaml",
        "docs/curve.png",
    } < {*files}
    authors = b"The lightning_mgpu authors"
    assert authors in files["LICENSE"]
    found = [
        name
        for name, content in files.items()
        if b"mgpu" in content.replace(authors, b"").lower() or "mgpu" in name
    ]
    assert not found
    rooms = "|".join((*new.ROOMS, "new"))
    assert not [name for name in files if re.search(rf"(^|[/_])({rooms})(/|\.py$)", name)]
    said = re.compile(rf"room: ({rooms})\b|python -m my_project[ .]({rooms})\b".encode())
    assert not [name for name, content in files.items() if said.search(content)]
    # whole files with a mark
    assert not {"docs/measurements.md", ".github/workflows/weekly.yml"} & {*files}
    assert (
        b"optuna" not in files["pyproject.toml"]
        and b'name = "my-project"' in files["pyproject.toml"]
    )
    assert b'PROJECT = "my-project"' in files["my_project/runs/wandb_run.py"]  # W&B's
    assert (copy / ".ci" / "run").stat().st_mode & 0o111


@pytest.fixture
def python(copy: Path, command_in: Callable[[Path], Any]) -> Callable[..., str]:
    """What Python says in the copy, which alone is on the path."""

    def python(*args: str, timeout: float) -> str:
        command = command_in(copy)
        code, out, err = command.finish(command.start(launcher=args, PYTHONPATH=str(copy)), timeout)
        assert code == 0, out[-5000:] + err[-5000:]
        return out

    return python


@pytest.mark.slow
def test_the_copy_trains_and_has_tests(python: Callable[..., str]) -> None:
    out = python("-c", HELP_TRAIN_AND_COLLECT, timeout=100)
    [offered] = re.findall("^subcommands: (.*)$", out, flags=re.MULTILINE)
    assert offered == "fit, validate, test, predict, export"
    assert "model:    LeNet" in out
    assert int(re.findall(r"^(\d+)(?:/\d+)? tests collected", out, flags=re.MULTILINE)[0]) > 500


@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_the_copys_tests_pass(python: Callable[..., str]) -> None:
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", timeout=3500)


def test_one_room_goes_alone(tmp_path: Path) -> None:
    new.main([str(tmp_path / "mine"), "--drop", "sweep"])
    names = {path.name for path in (tmp_path / "mine" / "mine").iterdir()}
    assert {"benchmark", "testing", "book.py"} < names and "sweep" not in names
    # it can go later
    assert "room: testing" in (tmp_path / "mine" / "docs" / "adding.md").read_text()


REFUSED = {
    "there": "it exists",
    "my-project": "my-project is no name for a package",
    "mine --drop sweep runs": "argument --drop: invalid choice: 'runs' (choose from "
    "'benchmark', 'testing', 'sweep'",
}


def test_refused(main: Callable[..., int], tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    (tmp_path / "there").mkdir()
    for args, told in REFUSED.items():
        assert main("new", *args.split()) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and told in err and err.count("\n") == 1
    monkeypatch.setattr(new, "CLONE", tmp_path)  # an installed package
    assert main("new", "mine") == 2
    assert "this is no clone" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_readme_makes_such_a_copy() -> None:
    [block] = re.findall("<!-- run: own -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    name, rooms = re.findall(
        r"^python -m lightning_mgpu new \.\./(\w+) --drop (.*)$", block, flags=re.MULTILINE
    )[0]
    assert {*rooms.split()} <= {*new.ROOMS}
    assert re.search(rf"^python -m {name} fit ", block, flags=re.MULTILINE)
