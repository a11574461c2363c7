"""A sweep's trials: which comes next, its arguments, its result. All state is in its directory.

Optuna draws the parameters. Its JournalStorage would not do for the records: a line that a full
disk cuts off makes the file unreadable for good, and a trial that failed cannot succeed later.
"""

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import matplotlib.pyplot as plt
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import create_trial
from optuna.visualization.matplotlib import plot_slice

from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import replace_text, replacing
from lightning_mgpu.processes import run_in_group
from lightning_mgpu.project import program

TRIAL = "--trainer.callbacks+=lightning_mgpu.sweep.Trial"
NO_CURVE = "--curve=false"  # the sweep has a picture of all trials
FAILED = "status "  # how the note begins on a trial whose process did not end with status 0


@dataclass
class Sweep:
    """A sweep in its directory, on which any number of processes may work.

    `trial_000.json` has the trial's `params` and, when it has ended, its `value` and a `note`,
    which is empty if all went well. A running trial holds a lock on its log, `trial_000.log`.
    A trial without a lock and a note is started, or resumed.
    """

    dir: Path
    method: str
    metric: str
    direction: Literal["minimize", "maximize"]
    space: dict[str, BaseDistribution]  # what varies, by the dotted name of the option
    fit_args: list[str]  # arguments that all trials share
    num_trials: int

    def create_or_check_dir(self) -> None:
        """Create the directory, or check that this same sweep has created it."""
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--sweep_dir={self.dir} cannot be made: {error.strerror}") from error
        settings = json.dumps(
            [self.method, self.metric, self.direction, str(self.space), self.fit_args], indent=1
        )
        with self._lock():
            if not (path := self.dir / "sweep.json").exists():
                replace_text(path, settings)
        if path.read_text() != settings:
            raise UsageError(
                f"{self.dir} holds another sweep, that of its {path.name}: repeat the command that "
                "began it, name a new directory with --sweep_dir, or delete this one"
            )

    def run(self) -> None:
        """Run every trial that has not ended and that no other process runs."""
        os.environ.setdefault("WANDB_RUN_GROUP", self.dir.name)
        for number in range(self.num_trials):
            run_dir = self.dir / f"trial_{number:03}"
            with run_dir.with_suffix(".log").open("a") as log:
                try:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                trial = self.records().get(run_dir.name) or {"params": self._draw(number)}
                # what has failed is tried once more: the disk may have been full
                if "note" in trial and not trial["note"].startswith(FAILED):
                    continue
                replace_text(record := run_dir.with_suffix(".json"), json.dumps(trial))
                value, note = self._run_trial(run_dir, trial["params"], log)
                replace_text(record, json.dumps({**trial, "value": value, "note": note}))
            self.write_report()

    def records(self) -> dict[str, dict[str, Any]]:
        """The records of the trials, by the names of their run directories."""
        paths = sorted(self.dir.glob("trial_*.json"))
        return {path.stem: json.loads(path.read_text()) for path in paths}

    def write_report(self) -> str:
        """Write `sweep.md`, a table, the best trial first, and `sweep.png`; returns the table."""
        sign = -1 if self.direction == "maximize" else 1
        with self._lock():
            ended = [(name, trial) for name, trial in self.records().items() if "note" in trial]
            ended.sort(key=lambda each: (each[1]["note"], sign * (each[1]["value"] or 0)))
            rows = [["trial", *self.space, self.metric, "note"], ["---"] * (len(self.space) + 3)]
            for name, trial in ended:
                cells = [name, *trial["params"].values(), trial["value"], trial["note"]]
                rows.append([_format(cell) for cell in cells])
            table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
            replace_text(self.dir / "sweep.md", table)
            if self.space and any(trial["value"] is not None for _, trial in ended):
                self._draw_picture()
        return table

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Wait for the lock on the files that all processes write."""
        with (self.dir / "sweep.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _draw(self, number: int) -> dict[str, Any]:
        """A new trial's parameters. Except for `bayes` they depend only on its number."""
        if self.method == "grid":  # the last parameter varies fastest
            choices: Any = [each.choices for each in self.space.values()]  # type: ignore[attr-defined]
            return dict(zip(self.space, list(itertools.product(*choices))[number]))
        sampler = TPESampler(seed=number) if self.method == "bayes" else RandomSampler(seed=number)
        return self._study(sampler).ask(self.space).params

    def _study(self, sampler: BaseSampler | None = None) -> optuna.Study:
        """The trials that have a value, for Optuna to draw from and to make its picture of."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(direction=self.direction, sampler=sampler)
        study.add_trials(
            create_trial(params=trial["params"], distributions=self.space, value=trial["value"])
            for trial in self.records().values()
            if trial.get("value") is not None
        )
        return study

    def _run_trial(
        self, run_dir: Path, params: dict[str, Any], log: IO[str]
    ) -> tuple[float | None, str]:
        """Run a trial to its end; returns its value, if it has one, and a note on what failed."""
        # in the YAML's order: --model before --model.lr
        trial_args = [as_argument(option, params[option]) for option in self.space]
        print(f"{run_dir.name}: {' '.join(trial_args)}", flush=True)
        if (run_dir / "checkpoints" / "last.ckpt").exists():
            args = [f"--resume={run_dir}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            args = [NO_CURVE, *self.fit_args, *trial_args, f"--run_dir={run_dir}", TRIAL]
        # the process inherits the lock on its log, and keeps the lock if this one is killed
        status = run_in_group([sys.executable, "-m", program(), "fit", *args], log)
        if status == 0:
            value, note = self._result(run_dir / "metrics.csv")
        else:
            value, note = None, f"{FAILED}{status}: {_last_error(Path(log.name))}"
        result = f"failed: {note}" if note else f"{self.metric} {value:.4f}"
        print(f"{run_dir.name}: {result}", flush=True)
        return value, note

    def _result(self, metrics: Path) -> tuple[float | None, str]:
        """The metric's best value over the epochs, as the best checkpoint is what a run is for.

        The last value tells whether the run has diverged; the first may not be finite, either.
        """
        rows = csv.DictReader(metrics.read_text().splitlines()) if metrics.exists() else ()
        values = [float(row[self.metric]) for row in rows if row.get(self.metric)]
        if not values:
            return None, f"metric: name: {self.metric}: no such metric is logged"
        if not math.isfinite(values[-1]):
            return None, f"diverged: {self.metric} is {values[-1]}"
        return (max if self.direction == "maximize" else min)(filter(math.isfinite, values)), ""

    def _draw_picture(self) -> None:
        with replacing(self.dir / "sweep.png") as path, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental functions, axes with one value
            plt.switch_backend("agg")
            plot_slice(self._study(), list(self.space), target_name=self.metric)
            plt.savefig(path, dpi=110, format="png", bbox_inches="tight")
            plt.close()


def as_argument(name: str, value: Any) -> str:
    """An option as on a command line: `null` and `true`, where Python writes None and True."""
    text = value if isinstance(value, str) else json.dumps(value).replace("Infinity", ".inf")
    return f"--{name}={text}"


def _last_error(log: Path) -> str:
    """The last line that begins with `error: `, else the last line."""
    lines = log.read_text(errors="replace").splitlines()
    return ([line for line in lines if line.startswith("error: ")] or lines or [""])[-1]


def _format(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str("" if cell is None else cell)
