"""`run.json` in a run directory: what the run was given, where it ran, and how it ended.

It is written when a run begins, and again when it ends. Until then `end` is null: if no
process locks the directory any more, the run was killed.
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
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parameter import is_lazy

from lightning_mgpu.devices import describe_devices, devices
from lightning_mgpu.files import replace_text
from lightning_mgpu.runs.best_checkpoint import RunCheckpoint
from lightning_mgpu.runs.last_checkpoint import LastCheckpoint

RUN_JSON = "run.json"
PACKAGES = (__package__.partition(".")[0], "torch", "lightning", "torchmetrics")
VALIDATION, TEST = re.compile(r"(val|valid|validation)[/_.]"), re.compile(r"test[/_.]")
GIT_SECONDS = 2.0  # how long git may take in a large repository


class RunJson:
    """Writes `run.json`, in the first process of a run.

    Args:
        run_dir: The run directory.
        facts: Values that are known when the run begins.
    """

    def __init__(self, run_dir: Path, facts: dict[str, Any]) -> None:
        num_resumes = read_run_json(run_dir).get("num_resumes", -1) + 1
        self.path = run_dir / RUN_JSON
        self.content: dict[str, Any] = {
            "begin": now(),
            "num_resumes": num_resumes,
            **facts,
            "num_parameters": None,  # known later
        }
        self.write(end=None)

    def write(self, **values: Any) -> None:
        """Write the file with these values, too."""
        self.content |= values
        replace_text(self.path, to_json(self.content))

    def write_end(self, error: BaseException | None, results: dict[str, Any]) -> None:
        """Write how the run ended; `why_stopped` says why it did so by itself."""
        state, why = "finished", results.pop("why_stopped", "")
        if isinstance(error, Exception):
            state, why = "failed", f"{type(error).__name__}: {error}"
        elif error is not None:
            state, why = "interrupted", "Ctrl-C or SIGTERM"
            # Lightning makes a SystemExit of a KeyboardInterrupt; another one is the user's own
            if type(error) is SystemExit and not isinstance(error.__context__, KeyboardInterrupt):
                why = f"sys.exit({error.code!r})"
        elif why:
            state = "stopped"
        with contextlib.suppress(OSError):  # the disk may be full: the run's own error counts
            self.write(end={"time": now(), "state": state, "why": why or None, **results})


def describe_run(trainer: Trainer, config: dict[str, Any]) -> dict[str, Any]:
    """Where a run takes place, and in which versions."""
    used = devices(trainer)
    return {
        "seed": config["seed_everything"],
        "strategy": type(trainer.strategy).__name__,
        "devices": describe_devices(used),
        "gpus": sorted({torch.cuda.get_device_name(each) for each in used if each.type == "cuda"}),
        "git": find_commit(),
        "versions": find_versions(),
    }


def describe_results(trainer: Trainer) -> dict[str, Any]:
    """The results of a run so far, also of one that ends by an error."""
    best = find_best(trainer)
    epoch = best["epoch"] if best else None
    validation, test, seconds = read_metrics(Path(trainer.default_root_dir), epoch)
    stops = [each.why_stopped for each in trainer.callbacks if isinstance(each, LastCheckpoint)]  # type: ignore[attr-defined]
    return {
        "why_stopped": "".join(stops),
        "epochs": trainer.current_epoch,
        "best": best,
        "validation": validation,
        "test": test,
        "seconds_per_epoch": seconds,
    }


def find_best(trainer: Trainer) -> dict[str, Any] | None:
    """The epoch of the best checkpoint, counted from 1, and the metric that made it the best."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # the file may have been in the making when the run ended, and the device may have failed
        with contextlib.suppress(Exception):
            if isinstance(callback, RunCheckpoint) and (epoch := callback.best_epoch) is not None:
                score = callback.best_model_score
                value = None if score is None else float(score)
                return {"epoch": epoch, "monitor": callback.monitor, "value": value}
    return None


def count_parameters(module: LightningModule) -> int:
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))


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


def read_metrics(
    run_dir: Path, epoch: int | None = None
) -> tuple[dict[str, float], dict[str, float], float | None]:
    """The last metrics of validation and of test in `metrics.csv`, and the mean seconds per epoch.

    Args:
        run_dir: The run directory.
        epoch: Take the metrics of validation from this epoch, which counts from 1.
    """
    rows: list[dict[str, str]] = []
    with contextlib.suppress(OSError), (run_dir / "metrics.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    of_epoch = [row for row in rows if epoch is None or row.get("epoch") == str(epoch - 1)]
    seconds = [float(row["epoch_seconds"]) for row in rows if row.get("epoch_seconds")]
    return _last(of_epoch, VALIDATION), _last(rows, TEST), mean(seconds) if seconds else None


def _last(rows: list[dict[str, str]], names: re.Pattern) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, text in (item for row in rows for item in row.items()):
        with contextlib.suppress(ValueError):  # users log texts, too
            values |= {name: float(text)} if text and names.match(name) else {}
    return values


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
