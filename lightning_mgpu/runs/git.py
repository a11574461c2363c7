"""Which version of the user's code runs: the git commit, and whether files were changed since."""

import inspect
import subprocess
from pathlib import Path
from typing import Any

SECONDS = 10.0  # git on a slow network file system must not hold up a run


def code_version(model_class: type) -> dict[str, Any]:
    """`git_commit` and `git_dirty` of the repository that holds the model's source.

    An installed model has none: then the working directory's is taken. Untracked files count as changes: a new module
    may be what the run imports.
    """
    try:
        source = Path(inspect.getfile(model_class)).resolve()
        tracked = _git(source.parent, "ls-files", source.name)
    except (TypeError, OSError, subprocess.SubprocessError):
        tracked = ""
    directory = source.parent if tracked else Path.cwd()
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        return {"git_commit": commit, "git_dirty": bool(_git(directory, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"git_commit": "unknown: no git, or no repository", "git_dirty": None}


def _git(directory: Path, *args: str) -> str:
    command = ["git", "-C", str(directory), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout.strip()
