"""`run.json` in a run directory: what the run was given, where it ran, and how it ended.

It is written when a run begins, and again when it ends. Until then `end` is null: a run whose
directory nobody locks any more was killed. This file imports neither torch nor Lightning, so that
programs that only read runs start at once.
"""

import contextlib
import csv
import fcntl
import json
import math
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import Any

from lightning_mgpu.files import replace_text

RUN_JSON = "run.json"
PACKAGES = (__package__.partition(".")[0], "torch", "lightning", "torchmetrics")
EVALUATED = re.compile(r"(val|valid|validation|test)[/_.].+")  # names of metrics
GIT_SECONDS = 2.0  # how long git may take in a large repository


class RunJson:
    """Writes `run.json`. Only the first process of a run makes one.

    `results` are added to `end`; whoever has a result puts it there while the run goes on.
    """

    def __init__(self, run_dir: Path, facts: dict[str, Any]) -> None:
        num_resumes = read_run_json(run_dir).get("num_resumes", -1) + 1
        self.path = run_dir / RUN_JSON
        self.record = {
            **facts,
            "git": find_commit(),
            "versions": find_versions(),
            "begin": now(),
            "num_resumes": num_resumes,
            "end": None,
        }
        self.results: dict[str, Any] = {}
        replace_text(self.path, to_json(self.record))

    def write_end(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write how the run ended; an exit callback of an `ExitStack`."""
        state, why = "finished", self.results.pop("why_stopped", "")
        if isinstance(error, Exception):
            state, why = "failed", f"{type(error).__name__}: {error}"
        elif error is not None:  # Lightning makes a SystemExit of a KeyboardInterrupt
            state, why = "interrupted", "Ctrl-C or SIGTERM"
        elif why:
            state = "stopped"
        self.record["end"] = {"time": now(), "state": state, "why": why or None, **self.results}
        with contextlib.suppress(OSError):  # the disk may be full: the run's own error counts
            replace_text(self.path, to_json(self.record))


def read_run_json(run_dir: Path) -> dict[str, Any]:
    """What `run.json` says; empty for a run of a version that wrote none."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((run_dir / RUN_JSON).read_text(encoding="utf-8")))
    return {}


def find_state(run_dir: Path) -> str:
    """running, finished, stopped (by itself), interrupted or failed; empty if nothing says it."""
    record = read_run_json(run_dir)
    if end := record.get("end"):
        return str(end["state"])
    directory = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:
        return ""  # a network file system without locks
    finally:
        os.close(directory)
    return "interrupted" if record else ""


def read_metrics(run_dir: Path, epoch: int | None = None) -> tuple[dict[str, float], float | None]:
    """The last values of validation and test in `metrics.csv`, and the mean seconds per epoch.

    With `epoch`, which counts from 0 as the file does, that epoch's values.
    """
    values: dict[str, float] = {}
    seconds: list[float] = []
    with contextlib.suppress(OSError, ValueError), (run_dir / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            if row.get("epoch_seconds"):
                seconds.append(float(row["epoch_seconds"]))
            if epoch is None or row["epoch"] == str(epoch):
                named = {name: text for name, text in row.items() if text and name}
                values |= {n: float(text) for n, text in named.items() if EVALUATED.fullmatch(n)}
    return values, mean(seconds) if seconds else None


def find_commit() -> dict[str, Any] | None:
    """The git commit of the working directory, and whether tracked files differ from it."""
    status = ("git", "--no-optional-locks", "status", "--porcelain=v2", "--branch")
    try:
        result = subprocess.run(
            [*status, "--untracked-files=no"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or a huge one
        return None
    lines = result.stdout.splitlines()
    commit = next(line.split()[2] for line in lines if line.startswith("# branch.oid "))
    return {"commit": commit, "is_dirty": any(not line.startswith("#") for line in lines)}


def find_versions() -> dict[str, str]:
    """Versions of this package and of those that compute, which a run has imported."""
    loaded = {name: sys.modules[name] for name in PACKAGES if name in sys.modules}
    return {"python": platform.python_version()} | {
        name: str(module.__version__) for name, module in loaded.items()
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def to_json(value: Any) -> str:
    """Strict JSON: null for NaN and infinities, the text of everything JSON does not have."""
    return json.dumps(_finite(value), indent=2, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
