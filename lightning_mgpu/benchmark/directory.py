"""Where a measurement's files go: a directory of its own, as every run of `fit` has one."""

import os
from datetime import datetime
from pathlib import Path

from lightning_mgpu.runs.directory import make_new
from lightning_mgpu.runs.errors import UsageError


def new_directory(given: str | None, what: str) -> Path:
    """Make `--run_dir`, or a directory in `runs` with the time and what is measured in its name.

    Raises:
        UsageError: If it exists and is not empty, or cannot be made.
    """
    path = Path(os.path.expanduser(given or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{what}"))
    if given and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise UsageError(f"--run_dir={path} exists and is not empty: name a new directory, one run has one")
    try:
        if not given:
            return make_new(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the run directory {path} cannot be made: {error.strerror}; choose another with --run_dir"
        ) from error
    return path
