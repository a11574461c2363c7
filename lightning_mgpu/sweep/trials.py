"""The trials of a sweep: which one is next, what it is given, what came of it. Files in its directory say it all."""

import csv
import fcntl
import itertools
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import matplotlib.pyplot as plt
import optuna
from filelock import FileLock
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.visualization.matplotlib import plot_slice

from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.files import replace_text, replacing
from lightning_mgpu.runs.processes import run_in_group

TRIAL = "--trainer.callbacks+=lightning_mgpu.sweep.Trial"


@dataclass
class Sweep:
    """A sweep in its directory, on which any number of processes may work.

    `trial_000.json` has the `params` of a trial and, when it has ended, its `value`, or `None` and a `note` why.
    `trial_000.log` is locked by whoever can write to it. So a trial without a `note` whose log is free was interrupted,
    or has not begun.
    """

    dir: Path
    method: str
    metric: str
    direction: Any  # `minimize` or `maximize`
    space: dict[str, BaseDistribution]  # what varies, by the dotted name of the option
    fit: list[str]  # arguments that all trials share
    num_trials: int
    seed: int

    def open(self) -> None:
        """Make the directory, or find it as this sweep has left it."""
        path = self.dir / "sweep.json"
        if not path.exists() and self.dir.exists() and any(self.dir.iterdir()):
            raise UsageError(f"{self.dir} is no sweep's: name a new directory with --sweep_dir")
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--sweep_dir={self.dir} cannot be made: {error.strerror}") from error
        settings = [self.method, self.metric, self.direction, str(self.space), self.fit, self.seed]
        with self.lock():
            if not path.exists():
                replace_text(path, json.dumps(settings, indent=1))
        if json.loads(path.read_text()) != settings:
            told = "repeat the command that began it, name a new directory with --sweep_dir, or delete this one"
            raise UsageError(f"{self.dir} holds another sweep, that of its {path.name}: {told}")

    def lock(self) -> FileLock:  # for files that all processes write
        return FileLock(self.dir / "sweep.lock")

    def records(self) -> dict[int, dict[str, Any]]:
        """By the trial's number."""
        paths = sorted(self.dir.glob("trial_*.json"))
        return {int(path.stem.removeprefix("trial_")): json.loads(path.read_text()) for path in paths}

    def run(self) -> Iterator[int]:
        """Run the trials that have not ended and that no other process runs; yields the number of each."""
        os.environ.setdefault("WANDB_RUN_GROUP", self.dir.name)
        for number in range(self.num_trials):
            path = self.dir / f"trial_{number:03}"
            with path.with_suffix(".log").open("a") as log:
                try:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                record = self.records().get(number) or {"params": self._draw(number)}
                if "note" in record:
                    continue
                replace_text(path.with_suffix(".json"), json.dumps(record))
                record |= self._run_trial(path, record["params"], log)
                replace_text(path.with_suffix(".json"), json.dumps(record))
            yield number

    def _draw(self, number: int) -> dict[str, Any]:
        """The parameters of a new trial. They are the same in any number of processes, but for `bayes`."""
        if self.method == "grid":  # the last parameter varies fastest
            points: Any = itertools.product(*(each.choices for each in self.space.values()))  # type: ignore[attr-defined]
            return dict(zip(self.space, list(points)[number]))
        seed = self.seed + number
        sampler = TPESampler(seed=seed) if self.method == "bayes" else RandomSampler(seed=seed)
        return self._study(sampler).ask(self.space).params

    def _study(self, sampler: BaseSampler | None = None) -> optuna.Study:
        """What Optuna draws from, and makes its picture of: the trials that have a value."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study, make = optuna.create_study(direction=self.direction, sampler=sampler), optuna.trial.create_trial
        for each in self.records().values():
            if each.get("value") is not None:
                study.add_trial(make(params=each["params"], distributions=self.space, value=each["value"]))
        return study

    def _run_trial(self, run_dir: Path, params: dict[str, Any], log: IO[str]) -> dict[str, Any]:
        """Run a trial to its end; returns its `value` and `note`."""
        given = [as_argument(option, params[option]) for option in self.space]  # --model before --model.lr
        print(f"{run_dir.name}: {' '.join(given)}", flush=True)
        if (run_dir / "checkpoints" / "last.ckpt").exists():
            arguments = [f"--resume={run_dir}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            arguments = [*self.fit, *given, f"--run_dir={run_dir}", TRIAL]
        # the process inherits the lock on its log, and keeps the lock if this one is killed
        status = run_in_group([sys.executable, "-m", "lightning_mgpu", "fit", *arguments], log)
        values, value, note = read_column(run_dir / "metrics.csv", self.metric), None, ""
        if status != 0:
            lines = Path(log.name).read_text(errors="replace").splitlines()
            note = f"status {status}: {([line for line in lines if line.startswith('error: ')] or lines or [''])[-1]}"
        elif not values:
            note = f"metric: name: {self.metric}: no such metric is logged"
        elif not math.isfinite(values[-1]):
            note = f"diverged: {self.metric} is {values[-1]}"
        else:
            value = max(values) if self.direction == "maximize" else min(values)
        print(f"{run_dir.name}: {f'failed: {note}' if note else f'{self.metric} {value:.4f}'}", flush=True)
        return {"value": value, "note": note}

    def write_report(self) -> str:
        """Write `sweep.csv` and `sweep.md`, the best trial first, and `sweep.png`; returns the text of `sweep.md`."""
        sign = -1 if self.direction == "maximize" else 1
        with self.lock():
            ended = [(number, each) for number, each in self.records().items() if "note" in each]
            ended.sort(key=lambda pair: (pair[1]["value"] is None, sign * (pair[1]["value"] or 0)))
            rows: list[list[Any]] = [["trial", *self.space, self.metric, "note"]]
            rows += [[number, *each["params"].values(), each["value"], each["note"]] for number, each in ended]
            with replacing(self.dir / "sweep.csv") as part, part.open("w", newline="") as file:
                csv.writer(file).writerows(rows)
            lines = [" | ".join(map(_cell, row)) for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
            replace_text(self.dir / "sweep.md", text := "".join(f"| {line} |\n" for line in lines))
            if self.space and any(each["value"] is not None for _, each in ended):
                self._draw_picture()
        return text

    def _draw_picture(self) -> None:
        with replacing(self.dir / "sweep.png") as part, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental functions, of axes with one value
            plt.switch_backend("agg")
            plot_slice(self._study(), list(self.space), target_name=self.metric)
            plt.savefig(part, dpi=110, format="png", bbox_inches="tight")
            plt.close()


def as_argument(name: str, value: Any) -> str:
    """An option as it stands on a command line: `null` and `true`, where Python writes None and True."""
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def read_column(path: Path, name: str) -> list[float]:
    """A column of a run's `metrics.csv`, epoch by epoch."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
