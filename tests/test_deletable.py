"""Every part that the README says can be deleted: without it, the other fast tests still pass."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_mgpu.tools import run_in_group
from tests.conftest import REPOSITORY


def deletable_parts():
    """Directories and files of the package, `sweep/` and `book.py`, from the README's tree."""
    tree = (REPOSITORY / "README.md").read_text().partition("\n## Directories\n")[2]
    lines = re.findall("^ +([^ ]+(?:, [^ ]+)*) +can be deleted", tree, re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


def copy_repository(target):
    """Copy the files that git tracks, or does not ignore, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in listed.stdout.split("\0"):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)


def delete_part(name, repository):
    """Delete a part of the package, its tests and its configs."""
    package = repository / "lightning_mgpu"
    # the first one: the template of a new project has a `sweep/`, too
    part = min(package.rglob(name), key=lambda path: len(path.parts))
    stem, tests = part.stem, repository / "tests" / part.parent.relative_to(package)
    paths = (part, tests / stem, tests / f"test_{stem}.py", repository / "configs" / stem)
    for path in filter(Path.exists, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", deletable_parts())
def test_the_rest_works_without(name, tmp_path, monkeypatch):
    copy_repository(copy := tmp_path / "copy")
    delete_part(name, copy)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("PYTHONPATH", str(copy))
    fast = ("-m", "not slow and not weekly", "-n2", "--dist=worksteal")
    command = [sys.executable, "-m", "pytest", "-q", *fast, f"--basetemp={tmp_path}/tmp"]
    with (tmp_path / "log").open("w") as log:
        status = run_in_group(command, log)
    lines = (tmp_path / "log").read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    assert status == 0, "\n".join([*failed, *lines[-1:]])
