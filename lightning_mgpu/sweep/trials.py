"""A sweep's trials: which is next, what it is given, what came of it. Its directory says it all."""

import csv
import fcntl
import itertools
import json
import math
import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import matplotlib.pyplot as plt
import optuna
from filelock import FileLock
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.visualization.matplotlib import plot_slice

from lightning_mgpu.cli.project import program
from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import replace_text, replacing
from lightning_mgpu.processes import run_in_group

TRIAL = "--trainer.callbacks+=lightning_mgpu.sweep.Trial"
FAILED = "status "  # begins a note on a trial that did not come to its end


@dataclass
class Sweep:
    """A sweep in its directory, on which any number of processes may work.

    `trial_000.json` has the `params` of a trial and, when it has ended, its `value`, or `None` and
    a `note` why. `trial_000.log` is locked by whoever can write to it. So a trial without a `note`
    whose log is free was interrupted, or has not begun.
    """

    dir: Path
    method: str
    metric: str
    direction: Any  # `minimize` or `maximize`
    space: dict[str, BaseDistribution]  # what varies, by the dotted name of the option
    fit: list[str]  # arguments that all trials share
    num_trials: int

    def open(self) -> None:
        """Make the directory, or find it as this sweep has left it."""
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--sweep_dir={self.dir} cannot be made: {error.strerror}") from error
        settings = json.dumps(
            [self.method, self.metric, self.direction, str(self.space), self.fit], indent=1
        )
        with self.lock():
            if not (path := self.dir / "sweep.json").exists():
                replace_text(path, settings)
        if path.read_text() != settings:
            raise UsageError(
                f"{self.dir} holds another sweep, that of its {path.name}: repeat the command that "
                "began it, name a new directory with --sweep_dir, or delete this one"
            )

    def lock(self) -> FileLock:  # for files that all processes write
        return FileLock(self.dir / "sweep.lock")

    def trials(self) -> dict[str, dict[str, Any]]:
        """The records, by the trial's name, which is its run directory's."""
        return {
            path.stem: json.loads(path.read_text())
            for path in sorted(self.dir.glob("trial_*.json"))
        }

    def run(self) -> None:
        """Run the trials not ended that no other process runs, and write the report after each."""
        os.environ.setdefault("WANDB_RUN_GROUP", self.dir.name)
        # tried again: the disk may have been full
        failed = {k for k, each in self.trials().items() if each.get("note", "").startswith(FAILED)}
        for number in range(self.num_trials):
            run_dir = self.dir / f"trial_{number:03}"
            with run_dir.with_suffix(".log").open("a") as log:
                try:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                trial = self.trials().get(run_dir.name) or {"params": self._draw(number)}
                if "note" in trial and run_dir.name not in failed:
                    continue
                replace_text(record := run_dir.with_suffix(".json"), json.dumps(trial))
                trial |= self._run_trial(run_dir, trial["params"], log)
                replace_text(record, json.dumps(trial))
            self.write_report()

    def _draw(self, number: int) -> dict[str, Any]:
        """A new trial's parameters: the same in any number of processes, but for `bayes`."""
        if self.method == "grid":  # the last parameter varies fastest
            points: Any = itertools.product(*(each.choices for each in self.space.values()))  # type: ignore[attr-defined]
            return dict(zip(self.space, list(points)[number]))
        sampler = TPESampler(seed=number) if self.method == "bayes" else RandomSampler(seed=number)
        return self._study(sampler).ask(self.space).params

    def _study(self, sampler: BaseSampler | None = None) -> optuna.Study:
        """What Optuna draws from, and makes its picture of: the trials that have a value."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study, make = (
            optuna.create_study(direction=self.direction, sampler=sampler),
            optuna.trial.create_trial,
        )
        for trial in self.trials().values():
            if trial.get("value") is not None:
                study.add_trial(
                    make(params=trial["params"], distributions=self.space, value=trial["value"])
                )
        return study

    def _run_trial(self, run_dir: Path, params: dict[str, Any], log: IO[str]) -> dict[str, Any]:
        """Run a trial to its end; returns its `value` and `note`."""
        # --model before --model.lr
        given = [as_argument(option, params[option]) for option in self.space]
        print(f"{run_dir.name}: {' '.join(given)}", flush=True)
        if (run_dir / "checkpoints" / "last.ckpt").exists():
            arguments = [f"--resume={run_dir}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            arguments = [*self.fit, *given, f"--run_dir={run_dir}", TRIAL]
        # the process inherits the lock on its log, and keeps the lock if this one is killed
        status = run_in_group([sys.executable, "-m", program(), "fit", *arguments], log)
        value, note = self._result(run_dir / "metrics.csv")
        if status != 0:
            lines = Path(log.name).read_text(errors="replace").splitlines()
            reason = ([line for line in lines if line.startswith("error: ")] or lines or [""])[-1]
            value, note = None, f"{FAILED}{status}: {reason}"
        print(
            f"{run_dir.name}: {f'failed: {note}' if note else f'{self.metric} {value:.4f}'}",
            flush=True,
        )
        return {"value": value, "note": note}

    def _result(self, metrics: Path) -> tuple[float | None, str]:
        """The metric's best value over the epochs of a run, or why there is none."""
        rows = csv.DictReader(metrics.read_text().splitlines()) if metrics.exists() else ()
        values = [float(row[self.metric]) for row in rows if row.get(self.metric)]
        if not values:
            return None, f"metric: name: {self.metric}: no such metric is logged"
        if not math.isfinite(values[-1]):
            return None, f"diverged: {self.metric} is {values[-1]}"
        values = list(filter(math.isfinite, values))  # the first epoch's may not be
        return max(values) if self.direction == "maximize" else min(values), ""

    def write_report(self) -> str:
        """Write `sweep.md`, a table, the best trial first, and `sweep.png`; returns the table."""
        sign = -1 if self.direction == "maximize" else 1
        with self.lock():
            ended = {name: trial for name, trial in self.trials().items() if "note" in trial}
            best_first = sorted(
                ended, key=lambda name: (ended[name]["note"], sign * (ended[name]["value"] or 0))
            )
            rows = [["trial", *self.space, self.metric, "note"], ["---"] * (len(self.space) + 3)]
            for name in best_first:
                trial = ended[name]
                rows.append(
                    [name, *map(_cell, [*trial["params"].values(), trial["value"]]), trial["note"]]
                )
            replace_text(
                self.dir / "sweep.md", table := "".join(f"| {' | '.join(row)} |\n" for row in rows)
            )
            if self.space and any(trial["value"] is not None for trial in ended.values()):
                self._draw_picture()
        return table

    def _draw_picture(self) -> None:
        with replacing(self.dir / "sweep.png") as part, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental functions, of axes with one value
            plt.switch_backend("agg")
            plot_slice(self._study(), list(self.space), target_name=self.metric)
            plt.savefig(part, dpi=110, format="png", bbox_inches="tight")
            plt.close()


def as_argument(name: str, value: Any) -> str:
    """An option as on a command line: `null` and `true`, where Python writes None and True."""
    text = value if isinstance(value, str) else json.dumps(value).replace("Infinity", ".inf")
    return f"--{name}={text}"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
