"""The trials of a sweep: which one is next, what it is given, what came of it. Files in its directory say it all."""

import csv
import fcntl
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import optuna
from filelock import FileLock
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.files import replace_text
from lightning_mgpu.runs.processes import run_in_group
from lightning_mgpu.sweep.plan import TRIAL, Plan, as_argument

SETTINGS = "sweep.json"
MISTAKE = 2  # the exit status of `fit` for a mistake of the user's

Record = dict[str, Any]
"""`params` of a trial; when it has ended, its `value`, or `None` and a `note` why, and its `seconds` of training."""


class Sweep:
    """A sweep in its directory, on which any number of processes may work.

    `trial_000.json` is the record of a trial. `trial_000.log` is locked by whoever can write to it. So a trial without
    a `note` whose log is free was interrupted, or has not begun.
    """

    def __init__(self, plan: Plan, fit: list[str], seed: int, sweep_dir: Path) -> None:
        self.plan, self.fit, self.seed, self.dir = plan, fit, seed, sweep_dir
        path = sweep_dir / SETTINGS
        if not path.exists() and sweep_dir.exists() and any(sweep_dir.iterdir()):
            raise UsageError(f"{sweep_dir} is no sweep's: name a new directory with --sweep_dir")
        try:
            sweep_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--sweep_dir={sweep_dir} cannot be made: {error.strerror}") from error
        self.lock = FileLock(sweep_dir / "sweep.lock")  # for files that all processes write
        settings = json.loads(json.dumps({**plan.asked, "arguments": fit, "seed": seed}))
        with self.lock:
            if not path.exists():
                replace_text(path, json.dumps(settings, indent=1))
        before = json.loads(path.read_text())
        if others := [key for key, value in settings.items() if before[key] != value]:
            raise UsageError(
                f"{sweep_dir} holds a sweep of other {others[0]}: {before[others[0]]}; repeat the command that began "
                "it, or name a new directory with --sweep_dir"
            )

    def records(self) -> dict[int, Record]:
        """By the trial's number."""
        paths = sorted(self.dir.glob("trial_*.json"))
        return {int(path.stem.removeprefix("trial_")): json.loads(path.read_text()) for path in paths}

    def run(self) -> Iterator[int]:
        """Run the trials that have not ended and that no other process runs; yields the number of each."""
        os.environ.setdefault("WANDB_RUN_GROUP", self.dir.name)  # the trials inherit it
        for number in range(self.plan.num_trials):
            with self._path(number, ".log").open("a") as log:
                try:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                record = self.records().get(number) or {"params": self._draw(number)}
                if "note" in record:
                    continue
                replace_text(self._path(number, ".json"), json.dumps(record))
                self._run_trial(number, record, log)
            yield number

    def _draw(self, number: int) -> dict[str, Any]:
        """The parameters of a new trial. They are the same in any number of processes, but for `bayes`."""
        if self.plan.points:
            return self.plan.points[number]
        seed = self.seed + number
        sampler = TPESampler(seed=seed) if self.plan.method == "bayes" else RandomSampler(seed=seed)
        return study_of(self.records(), self.plan, sampler).ask(self.plan.space).params

    def _run_trial(self, number: int, record: Record, log: IO[str]) -> None:
        """Run a trial to its end, and complete its record."""
        run_dir, metric = self._path(number), self.plan.metric
        params = record["params"]  # the options in the YAML's order: --model before --model.lr
        given = [as_argument(option, params[option]) for option in self.plan.space]
        print(f"trial {number}: {' '.join(given)}", flush=True)
        if (run_dir / "checkpoints" / "last.ckpt").exists():
            arguments = [f"--resume={run_dir}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            arguments = [*self.fit, *given, f"--run_dir={run_dir}", TRIAL]
        # the process inherits the lock on its log, and keeps the lock if this one is killed
        status = run_in_group([sys.executable, "-m", "lightning_mgpu", "fit", *arguments], log)
        values, seconds = (read_column(run_dir / "metrics.csv", name) for name in (metric, "epoch_seconds"))
        value, note = None, ""
        if status != 0:
            note = f"status {status}: {last_words(Path(log.name))}"
        elif not values:
            note = f"metric: name: {metric}: no such metric is logged"
        elif not math.isfinite(values[-1]):
            note = f"diverged: {metric} is {values[-1]}"
        else:
            value = max(values) if self.plan.direction == "maximize" else min(values)
        outcome = f"failed: {note}" if value is None else f"{metric} {value:.4f}"
        print(f"trial {number}: {outcome}", flush=True)
        if (status == MISTAKE or not values) and len(self.records()) == 1:  # in the YAML or the command line
            shutil.rmtree(self.dir)  # the corrected command begins anew
            raise UsageError(note)
        ended = {**record, "value": value, "note": note, "seconds": round(sum(seconds), 1)}
        replace_text(self._path(number, ".json"), json.dumps(ended))

    def _path(self, number: int, suffix: str = "") -> Path:
        return self.dir / f"trial_{number:03}{suffix}"


def study_of(records: dict[int, Record], plan: Plan, sampler: BaseSampler | None = None) -> optuna.Study:
    """What Optuna draws from, and makes its picture of: the trials that have a value."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction=plan.direction, sampler=sampler)
    for record in records.values():
        if record.get("value") is not None:
            params, value = record["params"], record["value"]
            study.add_trial(optuna.trial.create_trial(params=params, distributions=plan.space, value=value))
    return study


def read_column(path: Path, name: str) -> list[float]:
    """A column of a run's `metrics.csv`, epoch by epoch."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def last_words(log: Path) -> str:
    """What a log ends with: an `error: ` of a few lines, or a traceback, whose last line tells."""
    text = log.read_text(errors="replace").strip()
    told = text.rpartition("\nerror: " if "\nerror: " in f"\n{text}" else "\n")[2].removeprefix("error: ")
    return " ".join(told.split())
