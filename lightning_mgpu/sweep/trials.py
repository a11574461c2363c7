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
from pathlib import Path
from typing import IO, Any

import matplotlib.pyplot as plt
import optuna
from filelock import FileLock
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.visualization.matplotlib import plot_slice

from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.files import replace_text, replacing
from lightning_mgpu.runs.processes import run_in_group
from lightning_mgpu.sweep.plan import TRIAL, Plan, as_argument

Record = dict[str, Any]
"""`params` of a trial; when it has ended, its `value`, or `None` and a `note` why."""


class Sweep:
    """A sweep in its directory, on which any number of processes may work.

    `trial_000.json` is the record of a trial. `trial_000.log` is locked by whoever can write to it. So a trial without
    a `note` whose log is free was interrupted, or has not begun.
    """

    def __init__(self, plan: Plan, fit: list[str], seed: int, sweep_dir: Path) -> None:
        self.plan, self.fit, self.seed, self.dir = plan, fit, seed, sweep_dir
        path = sweep_dir / "sweep.json"
        if not path.exists() and sweep_dir.exists() and any(sweep_dir.iterdir()):
            raise UsageError(f"{sweep_dir} is no sweep's: name a new directory with --sweep_dir")
        try:
            sweep_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--sweep_dir={sweep_dir} cannot be made: {error.strerror}") from error
        self.lock = FileLock(sweep_dir / "sweep.lock")  # for files that all processes write
        settings = json.dumps([plan.asked, fit, seed], indent=1)
        with self.lock:
            if not path.exists():
                replace_text(path, settings)
        if path.read_text() != settings:
            raise UsageError(
                f"{sweep_dir} holds another sweep: repeat the command that began it ({path.name} has its YAML, its "
                "arguments and its seed), name a new directory with --sweep_dir, or delete this one"
            )

    def records(self) -> dict[int, Record]:
        """By the trial's number."""
        paths = sorted(self.dir.glob("trial_*.json"))
        return {int(path.stem.removeprefix("trial_")): json.loads(path.read_text()) for path in paths}

    def run(self) -> Iterator[int]:
        """Run the trials that have not ended and that no other process runs; yields the number of each."""
        os.environ.setdefault("WANDB_RUN_GROUP", self.dir.name)
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
                record |= self._run_trial(number, record["params"], log)
                replace_text(self._path(number, ".json"), json.dumps(record))
            yield number

    def _draw(self, number: int) -> dict[str, Any]:
        """The parameters of a new trial. They are the same in any number of processes, but for `bayes`."""
        space, seed = self.plan.space, self.seed + number
        if self.plan.method == "grid":  # the last parameter varies fastest
            points: Any = itertools.product(*(each.choices for each in space.values()))  # type: ignore[attr-defined]
            return dict(zip(space, list(points)[number]))
        sampler = TPESampler(seed=seed) if self.plan.method == "bayes" else RandomSampler(seed=seed)
        return self._study(sampler).ask(space).params

    def _study(self, sampler: BaseSampler | None = None) -> optuna.Study:
        """What Optuna draws from, and makes its picture of: the trials that have a value."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study, space = optuna.create_study(direction=self.plan.direction, sampler=sampler), self.plan.space
        for each in self.records().values():
            if each.get("value") is not None:
                trial = optuna.trial.create_trial(params=each["params"], distributions=space, value=each["value"])
                study.add_trial(trial)
        return study

    def _run_trial(self, number: int, params: dict[str, Any], log: IO[str]) -> Record:
        """Run a trial to its end; returns its `value` and `note`."""
        run_dir, metric = self._path(number), self.plan.metric
        given = [as_argument(option, params[option]) for option in self.plan.space]  # --model before --model.lr
        print(f"trial {number}: {' '.join(given)}", flush=True)
        if (run_dir / "checkpoints" / "last.ckpt").exists():
            arguments = [f"--resume={run_dir}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            arguments = [*self.fit, *given, f"--run_dir={run_dir}", TRIAL]
        # the process inherits the lock on its log, and keeps the lock if this one is killed
        status = run_in_group([sys.executable, "-m", "lightning_mgpu", "fit", *arguments], log)
        values = read_column(run_dir / "metrics.csv", metric)
        value, note = None, ""
        if status != 0:
            lines = Path(log.name).read_text(errors="replace").splitlines()
            note = f"status {status}: {([line for line in lines if line.startswith('error: ')] or lines or [''])[-1]}"
        elif not values:
            note = f"metric: name: {metric}: no such metric is logged"
        elif not math.isfinite(values[-1]):
            note = f"diverged: {metric} is {values[-1]}"
        else:
            value = max(values) if self.plan.direction == "maximize" else min(values)
        print(f"trial {number}: {f'failed: {note}' if note else f'{metric} {value:.4f}'}", flush=True)
        return {"value": value, "note": note}

    def write_report(self) -> str:
        """Write `sweep.csv` and `sweep.md`, the best trial first, and `sweep.png`; returns the text of `sweep.md`."""
        with self.lock:
            ended = [(number, record) for number, record in self.records().items() if "note" in record]
            sign = -1 if self.plan.direction == "maximize" else 1
            ended.sort(key=lambda each: (each[1]["value"] is None, sign * (each[1]["value"] or 0)))
            rows: list[list[Any]] = [["trial", *self.plan.space, self.plan.metric, "note"]]
            for number, record in ended:
                params = ["null" if value is None else value for value in record["params"].values()]
                rows.append([number, *params, record["value"], record["note"]])
            with replacing(self.dir / "sweep.csv") as part, part.open("w", newline="") as file:
                csv.writer(file).writerows(rows)
            lines = [" | ".join(map(_cell, row)) for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
            replace_text(self.dir / "sweep.md", text := "".join(f"| {line} |\n" for line in lines))
            if self.plan.space and any(record["value"] is not None for _, record in ended):
                self._draw_picture()
        return text

    def _draw_picture(self) -> None:
        with replacing(self.dir / "sweep.png") as part, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental functions, of axes with one value
            plt.switch_backend("agg")
            plot_slice(self._study(), list(self.plan.space), target_name=self.plan.metric)
            plt.savefig(part, dpi=110, format="png", bbox_inches="tight")
            plt.close()

    def _path(self, number: int, suffix: str = "") -> Path:
        return self.dir / f"trial_{number:03}{suffix}"


def read_column(path: Path, name: str) -> list[float]:
    """A column of a run's `metrics.csv`, epoch by epoch."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
    return text.replace("|", "\\|")
