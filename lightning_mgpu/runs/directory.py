"""Run directories: naming, finding and locking them, and reading their files."""

import contextlib
import fcntl
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.tools import PART, UsageError

CONFIG, RUN_JSON = "config.yaml", "run.json"
MODEL = "model.txt"  # written before the first batch
OWN_CHECKPOINTS = "own_checkpoints"  # of the user's ModelCheckpoint callbacks
RUN_DIR_ENV = "LIGHTNING_MGPU_RUN_DIR"  # passes the run directory to the processes of `ddp`


def name_run_dir(run_dir: str | None, root: str | None, *parts: object) -> Path:
    """The path of a new run: `run_dir`, or a timestamp and `parts` in `root` or `runs/`."""
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return Path(run_dir or os.environ.get(RUN_DIR_ENV, "runs"))
    now = f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"[:-3]  # with milliseconds
    path = Path(run_dir or Path(root or "runs", "_".join(map(str, (now, *parts)))))
    # after a kill it may contain only an unfinished config.yaml
    files = path.iterdir() if path.is_dir() else ()
    if path.is_file() or any(not file.name.startswith(PART) for file in files):
        raise UsageError(f"--run_dir={path} exists and is not empty: use a new directory")
    return path


def newest_fits() -> list[Path]:
    """Runs of `fit` in `runs/` that have started training, newest first."""
    begun = [path.parent for path in Path("runs").glob(f"*/{MODEL}")]
    fits = [path for path in begun if " fit" in read_run_json(path).get("command", "")]
    return sorted(fits, key=lambda path: -(path / RUN_JSON).stat().st_mtime)


def lock_run_dir(run_dir: Path) -> int:
    """Create and lock a run directory. Closing the returned file descriptor unlocks it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    directory = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(directory)
        raise UsageError(f"{run_dir} is still running: stop that process first") from error
    except OSError:
        pass  # a network file system without locks
    return directory


def read_run_json(run_dir: Path) -> dict[str, Any]:
    """The content of `run.json`; empty if it is missing or broken."""
    kinds = {"command": str, "begin": str, "options": dict, "metrics": dict}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
        content = json.loads((run_dir / RUN_JSON).read_text(encoding="utf-8"))
        values = content | (content.get("end") or {})
        if all(isinstance(values.get(name) or kind(), kind) for name, kind in kinds.items()):
            return dict(content)
    return {}


def config_beside(ckpt_path: str | Path) -> Path | None:
    """The `config.yaml` of the run that contains a checkpoint, if any."""
    directory = Path(ckpt_path).absolute().parent
    # no further up: a config.yaml there may be unrelated
    is_inside = directory.name in ("checkpoints", OWN_CHECKPOINTS)
    places = [directory, *([directory.parent] if is_inside else [])]
    runs = (path for path in places if (path / CONFIG).is_file() and (path / RUN_JSON).is_file())
    return next((path / CONFIG for path in runs), None)


def flatten(config: dict[Any, Any], key: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to command-line names.

    `{"model": {"class_path": "LeNet", "init_args": {"lr": 0.1}}}`
    -> `{"model": "LeNet", "model.lr": 0.1}`. The items of a list of mappings are numbered.
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        path = key if name in ("class_path", "init_args") else f"{key}.{name}".lstrip(".")
        if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
            value = dict(enumerate(value))
        is_nested = isinstance(value, dict) and (value or name == "init_args")
        flat |= flatten(value, path) if is_nested else {path: value}
    return flat
