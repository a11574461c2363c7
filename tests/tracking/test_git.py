"""The commit of the model's repository, else of the working directory's, else why there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
from lightning_mgpu.tracking import code_version


def git(directory: Path, *args: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@x")
    command = ["git", "-C", str(directory), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one committed module `mine`, and the working directory elsewhere."""
    (tmp_path / "repository").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "repository")
    (tmp_path / "repository" / "mine.py").write_text("class Model: ...\n")
    git(tmp_path / "repository", "init")
    git(tmp_path / "repository", "add", "mine.py")
    git(tmp_path / "repository", "commit", "-m", "first")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path / "repository"


def model() -> type:
    import mine  # type: ignore[import-not-found]

    return mine.Model


def test_the_models_repository(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    sys.dont_write_bytecode = True
    assert code_version(model()) == {"git_commit": commit, "git_dirty": False}
    (repository / "mine.py").write_text("class Model: x = 1\n")
    assert code_version(model()) == {"git_commit": commit, "git_dirty": True}


def test_an_installed_model_leaves_the_working_directory_to_say(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_version(Path) == {"git_commit": "unknown: no git repository", "git_dirty": None}
    monkeypatch.chdir(repository)
    assert code_version(Path)["git_commit"] == git(repository, "rev-parse", "HEAD")
    assert code_version(int)["git_commit"] == git(repository, "rev-parse", "HEAD")  # no file at all


def test_a_repository_without_a_commit(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path / "elsewhere", "init")
    assert code_version(Path)["git_commit"].startswith("unknown: ") and "HEAD" in code_version(Path)["git_commit"]


def test_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert code_version(model()) == {"git_commit": "unknown: git is not installed", "git_dirty": None}


def test_git_that_does_not_answer(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 20\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("lightning_mgpu.tracking.git.SECONDS", 0.2)
    assert code_version(model()) == {"git_commit": "unknown: git did not answer within 0.2 s", "git_dirty": None}
