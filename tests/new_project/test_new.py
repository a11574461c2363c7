"""`new` writes a project that depends on this package, and trains, tests and sweeps with it."""

import re
from collections.abc import Callable
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


def test_its_files_have_its_name(project: Path) -> None:
    texts = {
        str(path.relative_to(project)): path.read_text()
        for path in project.rglob("*")
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


REFUSED = {
    "there": "it exists",
    "my-project": "my-project is not a name for a package",
    "torch": "Python has a package torch already",
    "mine --from ../clone": "give the URL that pip installs lightning-mgpu from",
    "file/mine": "cannot be written: Not a directory",
    "mine --drop=sweep": "--drop",
}


def test_refused(main: Callable[..., int], tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    for args, reason in REFUSED.items():
        assert main("new", *args.split()) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and reason in err and err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file"}


def test_the_readme_makes_such_a_project() -> None:
    [block] = re.findall("<!-- run: own -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    [name] = re.findall(r"^python -m lightning_mgpu new \.\./(\w+)$", block, flags=re.MULTILINE)
    assert re.search(rf"^python -m {name} fit ", block, flags=re.MULTILINE)
