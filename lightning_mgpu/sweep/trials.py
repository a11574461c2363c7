"""A sweep's trials: which comes next, its arguments, its result. `sweep.db` is Optuna's."""

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
from typing import Any, Literal

import matplotlib.pyplot as plt
import optuna
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState
from optuna.visualization.matplotlib import plot_slice

from lightning_mgpu.runs.checkpoints import LAST
from lightning_mgpu.runs.metrics import read_rows
from lightning_mgpu.tools import UsageError, program, replacing, run_in_group


@dataclass
class Sweep:
    """A sweep in its directory, on which any number of processes of one machine may work.

    The processes of a trial hold a lock on its log, `trial_000.log`. A trial that has not ended,
    and whose log is not locked, was killed: it goes on by `--resume`.
    """

    dir: Path
    metric: str
    direction: Literal["minimize", "maximize"]
    method: str  # grid, random or bayes
    space: dict[str, Any]  # Optuna's distributions by the dotted name of the option
    fit_args: list[str]  # arguments that all trials share
    num_trials: int | None  # `None` for all points of a grid

    def run(self) -> None:
        """Run every trial that has not ended and that no other process runs; print a table."""
        os.environ.setdefault("WANDB_RUN_GROUP", self.dir.name)
        study = self._open_study()
        print(f"trials in {self.dir}; Ctrl-C stops, the same command goes on", flush=True)
        for trial, log in self._take_trials(study):
            with log:
                value = self._run_trial(trial, log)
                study.tell(trial.number, value, TrialState.FAIL if value is None else None)
            with self._lock("sweep.lock"):
                self.write_report(study)
        print(f"\n{self.write_report(study)}\nreport: {self.dir}/sweep.md, sweep.png", flush=True)

    def _open_study(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.dir.mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{self.dir}/sweep.db"
        settings = str([self.method, self.metric, self.direction, self.space, self.fit_args])
        with self._lock("sweep.lock"):
            study = optuna.create_study(
                storage=storage, study_name="sweep", direction=self.direction, load_if_exists=True
            )
            if study.user_attrs.get("settings", settings) != settings:
                raise UsageError(f"{self.dir} holds another sweep: take another --sweep_dir")
            study.set_user_attr("settings", settings)
            if self.method == "grid":  # the last parameter varies fastest
                points = [*itertools.product(*(each.choices for each in self.space.values()))]
                self.num_trials = min(self.num_trials or len(points), len(points))
                for values in points[len(study.trials) :]:
                    study.enqueue_trial(dict(zip(self.space, values)))
        return study

    def _take_trials(self, study: optuna.Study) -> Iterator[tuple[Any, Any]]:
        """Trials to run, with their locked logs: killed ones first, then new ones."""
        trial: Any
        while True:
            with self._lock("sweep.lock"):
                num_begun = sum(each.state != TrialState.WAITING for each in study.trials)
                for trial in study.get_trials(states=(TrialState.RUNNING,)):
                    if log := self._lock(f"{name(trial)}.log", fcntl.LOCK_NB):
                        break
                else:
                    if num_begun == self.num_trials:
                        return
                    study.sampler = RandomSampler(num_begun)
                    if self.method == "bayes":
                        study.sampler = TPESampler(seed=num_begun, constant_liar=True)
                    trial = study.ask(self.space)
                    log = self._lock(f"{name(trial)}.log")
            yield trial, log

    def _lock(self, file_name: str, flag: int = 0) -> Any:
        """A file, locked until it is closed; with `LOCK_NB`, `None` if it is locked already."""
        file = (self.dir / file_name).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | flag)
        except BlockingIOError:
            return file.close()
        return file

    def _run_trial(self, trial: Any, log: Any) -> float | None:
        """Run a trial to its end; returns its best value over the epochs, if it has one."""
        # in the YAML's order: --model before --model.lr
        trial_args = [as_argument(option, trial.params[option]) for option in self.space]
        print(f"{name(trial)}: {' '.join(trial_args)}", flush=True)
        run_dir = self.dir / name(trial)
        args = [f"--resume={run_dir}"]
        if not (run_dir / "checkpoints" / LAST).exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            # a trial does not look at the test set, and the sweep has a picture of all trials
            off = ("--output.test=false", "--output.curve=false")
            args = [*off, *self.fit_args, *trial_args, f"--run_dir={run_dir}"]
        status = run_in_group([sys.executable, "-m", program(), "fit", *args], log)
        rows = read_rows(run_dir) if status == 0 else []
        values = [float(row[self.metric]) for row in rows if row.get(self.metric)]
        value, told = None, f"failed, status {status}, {values[-1:]}: see {log.name}"
        if values and math.isfinite(values[-1]):  # else it has diverged
            value = (max if self.direction == "maximize" else min)(filter(math.isfinite, values))
            told = f"{self.metric} {value:.4f}"
        print(f"{name(trial)}: {told}", flush=True)
        return value

    def write_report(self, study: optuna.Study) -> str:
        """Write `sweep.md`, a table, the best trial first, and `sweep.png`; returns the table."""
        sign = -1 if self.direction == "maximize" else 1
        ended = [trial for trial in study.trials if trial.state.is_finished()]
        ended.sort(key=lambda trial: math.inf if trial.value is None else sign * trial.value)
        table = f"| trial | {' | '.join([*self.space, self.metric])} |\n"
        table += "| --- " * (len(self.space) + 2) + "|\n"
        for trial in ended:
            cells = [*map(trial.params.get, self.space), trial.value]
            texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
            table += f"| {name(trial)} | {' | '.join(texts)} |\n"
        with replacing(self.dir / "sweep.md") as part:
            part.write_text(table)
        if self.space:
            with replacing(self.dir / "sweep.png") as part, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # experimental functions, axes with one value
                plt.switch_backend("agg")
                plot_slice(study, list(self.space), target_name=self.metric)
                plt.savefig(part, dpi=110, bbox_inches="tight")
                plt.close()
        return table


def name(trial: Any) -> str:
    return f"trial_{trial.number:03}"


def as_argument(option: str, value: Any) -> str:
    """An option as on a command line: `null` and `true`, where Python writes None and True."""
    return f"--{option}={value if isinstance(value, str) else json.dumps(value)}"
