"""Which version of the user's code runs: the git commit, and whether files were changed since."""

import inspect
import subprocess
from pathlib import Path
from typing import Any

SECONDS = 10.0  # git on a slow network file system must not hold up a run


def code_version(model_class: type) -> dict[str, Any]:
    """`git_commit` (or why there is none) and `git_dirty` of the repository that holds the model's source.

    A model that is installed, or written in a notebook, has none: then the working directory's is taken.
    """
    try:
        source = Path(inspect.getfile(model_class)).resolve()
        if _git(source.parent, "ls-files", source.name):  # committed there, not merely below, as a .venv is
            return _version(source.parent)
    except (TypeError, OSError, subprocess.SubprocessError):
        pass  # no file, no git, or no repository: the working directory tells which
    try:
        return _version(Path.cwd())
    except FileNotFoundError:
        reason = "git is not installed"
    except subprocess.TimeoutExpired:
        reason = f"git did not answer within {SECONDS:g} s"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["git failed"]
        reason = "no git repository" if "not a git repository" in lines[0] else lines[0].removeprefix("fatal: ")
    return {"git_commit": f"unknown: {reason}", "git_dirty": None}


def _version(directory: Path) -> dict[str, Any]:
    """Untracked files count as changes: a new module may be what the run imports."""
    return {
        "git_commit": _git(directory, "rev-parse", "HEAD"),
        "git_dirty": bool(_git(directory, "status", "--porcelain")),
    }


def _git(directory: Path, *args: str) -> str:
    command = ["git", "-C", str(directory), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout.strip()
