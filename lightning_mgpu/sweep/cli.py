"""Many fits from one YAML; no account, no server.

python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.max_epochs=2

Every other argument is one of `fit`, the same for all trials. The same command again goes on where
the sweep was stopped. In a second terminal it takes a share of the trials. The YAML is in W&B's
format: https://docs.wandb.ai/guides/sweeps/sweep-config-keys
"""

import fcntl
import itertools
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import optuna
from numpy import ravel
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState
from optuna.visualization.matplotlib import plot_slice
from sqlalchemy.exc import DatabaseError

from lightning_mgpu.cli.options import one_string_per_option, options_by_name
from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.runs.metrics import read_rows
from lightning_mgpu.tools import (
    LAST,
    UsageError,
    check_range,
    make_parser,
    program,
    replacing,
    run_in_group,
)


def sweep_command(arguments: Sequence[str]) -> None:
    sweep = Sweep(arguments)
    try:
        sweep.run()
    except DatabaseError as error:  # on a full disk, or a file that is not one
        told = f"{sweep.dir}/sweep.db: {error.orig}; once that is mended, the same command goes on"
        raise UsageError(told) from error


class Sweep:
    """A sweep in its directory. A running trial locks its log: without a lock, it was killed."""

    def __init__(self, arguments: Sequence[str]) -> None:
        parser = make_parser("sweep", __doc__)
        parser.add_argument("--config", action="append", required=True, help="the sweep's first")
        parser.add_argument("--count", type=int, help="trials in all, over the YAML's run_cap")
        parser.add_argument("--sweep_dir", type=Path, help="default: sweeps/YAML")
        options, fit_args = parser.parse_known_args(arguments)
        config, *fit_configs = options.config
        self.dir = options.sweep_dir or Path("sweeps", Path(config).stem)
        yaml = read_config(config)
        try:
            # for W&B's agent: what follows `fit` is for all
            words = yaml.get("command", ["fit"])
            self.shared = [str(x) for x in words[words.index("fit") + 1 :] if x != "${args}"]
            self.space: dict[str, Any] = {}  # distributions by the dotted name of the option
            for option, spec in yaml["parameters"].items():
                if "value" in spec:
                    self.shared.append(f"--{option}={as_text(spec['value'])}")
                else:
                    self.space[option] = distribution(option, spec)
            if (count := options.count or yaml.get("run_cap")) is not None:
                check_range("count", count)
            self.method = yaml["method"]
            if self.method == "grid":  # the last parameter varies fastest
                self.points = [*itertools.product(*(x.choices for x in self.space.values()))]
                count = min(count or len(self.points), len(self.points))
            elif count is None or self.method not in ("random", "bayes"):
                raise ValueError("method: grid, or random or bayes with --count=20")
            self.num_trials: int = count
            self.metric = yaml["metric"]["name"]
            self.direction = yaml["metric"].get("goal")
            if self.direction not in ("minimize", "maximize"):
                raise ValueError(f"goal: {self.direction}: minimize, or maximize")
            if "early_terminate" in yaml:
                raise ValueError("early_terminate: every trial runs to its end; leave it out")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"--config={config} is not a sweep: {error!r}") from error
        given = {argument[2:].partition("=")[0] for argument in fit_args}
        if taken := given & {*self.space, "run_dir", "resume"}:
            raise UsageError(f"--{taken.pop()}: the sweep sets it; leave it out")
        self.shared += [*(f"--config={path}" for path in fit_configs), *fit_args]
        options_of_all = options_by_name(one_string_per_option(self.shared))
        size = {**options_of_all, **self.space}.get("data.val_size")
        if "0" in map(str, getattr(size, "choices", [size])):
            raise UsageError("--data.val_size=0: trials would tune on the test set")

    def run(self) -> None:
        """Run all trials that have not ended and no other process runs; print a table."""
        os.environ.setdefault("WANDB_RUN_GROUP", self.dir.name)
        study = self._open_study()
        print(f"trials in {self.dir}; Ctrl-C stops, the same command goes on", flush=True)
        for trial, log in self._take_trials(study):
            with log:
                value = self._run_trial(trial, log)
                study.tell(trial.number, value, TrialState.FAIL if value is None else None)
            with self._lock("sweep.lock"):
                self._write_report(study)
        print(f"\n{self._write_report(study)}\nreport: {self.dir}/sweep.md, sweep.png", flush=True)
        if all(trial.value is None for trial in study.trials):
            fix = "mend what the logs say, and take another --sweep_dir"
            raise UsageError(f"no trial in {self.dir} has a value of {self.metric}: {fix}")

    def _open_study(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore")  # experimental functions, axes with one value
        self.dir.mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{self.dir}/sweep.db"
        settings = str([self.method, self.metric, self.direction, self.space, self.shared])
        with self._lock("sweep.lock"):
            study = optuna.create_study(
                storage=storage, study_name="sweep", direction=self.direction, load_if_exists=True
            )
            if study.user_attrs.get("settings", settings) != settings:
                raise UsageError(f"{self.dir} holds another sweep: take another --sweep_dir")
            study.set_user_attr("settings", settings)
            for values in self.points[len(study.trials) :] if self.method == "grid" else ():
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
                    if num_begun >= self.num_trials:
                        return
                    study.sampler = RandomSampler(num_begun)
                    if self.method == "bayes":
                        study.sampler = TPESampler(seed=num_begun, constant_liar=True)
                    trial = study.ask(self.space)
                    log = self._lock(f"{name(trial)}.log")
            yield trial, log

    def _lock(self, file_name: str, flag: int = 0) -> Any:
        """A file, locked until it is closed; with `LOCK_NB`, `None` if it is taken."""
        file = (self.dir / file_name).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | flag)
        except BlockingIOError:
            return file.close()
        return file

    def _run_trial(self, trial: Any, log: Any) -> float | None:
        """Run a trial to its end; returns its best value over the epochs, if it has one."""
        # in the YAML's order: --model before --model.lr
        trial_args = [f"--{option}={as_text(trial.params[option])}" for option in self.space]
        print(f"{name(trial)}: {' '.join(trial_args)}", flush=True)
        run_dir = self.dir / name(trial)
        args = [f"--resume={run_dir}"]
        if not (run_dir / "checkpoints" / LAST).exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            # a trial does not look at the test set, and the sweep has a picture of all trials
            off = ("--output.test=false", "--output.curve=false")
            args = [*off, *self.shared, *trial_args, f"--run_dir={run_dir}"]
        status = run_in_group([sys.executable, "-m", program(), "fit", *args], log)
        rows = read_rows(run_dir) if status == 0 else []
        values = [float(row[self.metric]) for row in rows if row.get(self.metric)]
        logged = f"{self.metric} {values[-1] if values else 'was not logged'}"
        value, told = None, f"failed, {f'status {status}' if status else logged}: see {log.name}"
        if values and math.isfinite(values[-1]):  # else it has diverged
            value = (max if self.direction == "maximize" else min)(filter(math.isfinite, values))
            told = f"{self.metric} {value:.4f}"
        print(f"{name(trial)}: {told}", flush=True)
        return value

    def _write_report(self, study: optuna.Study) -> str:
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
        if self.space and ended and (best := ended[0]).value is not None:
            with replacing(self.dir / "sweep.png") as part:
                told = f"{self.metric}, {self.direction}d over epochs"
                panels: Any = plot_slice(study, list(self.space), target_name=told)
                for axes in ravel(panels):
                    dots = axes.collections[0].get_offsets()  # a category has a place there, too
                    axes.set_title("")
                    axes.plot(*dots[(sign * dots[:, 1]).argmin()], "r*", markersize=16)
                title = f"{self.dir.name}, {len(ended)} trials. The best, {name(best)}, is red"
                plt.gcf().suptitle(f"{title}: {self.metric} {best.value:.4g}", y=0.98)
                plt.savefig(part, dpi=110, bbox_inches="tight")
                plt.close()
        return table


def name(trial: Any) -> str:
    return f"trial_{trial.number:03}"


def as_text(value: Any) -> str:
    """A value as on a command line: `null` and `true`, where Python writes None and True."""
    return value if isinstance(value, str) else json.dumps(value)


def distribution(option: str, spec: dict[str, Any]) -> optuna.distributions.BaseDistribution:
    if "probabilities" in spec:
        raise ValueError(f"--{option}: probabilities: values count alike; leave them out")
    if "values" in spec:
        values = spec["values"]
        if any(isinstance(value, (list, dict)) for value in values):  # Optuna hashes values
            values = [as_text(value) for value in values]
        return CategoricalDistribution(values)
    if not {"min", "max"} <= spec.keys():
        told = "give value, values, or min and max; parameters are not nested, but dotted names"
        raise ValueError(f"--{option}: {spec}: {told}")
    if spec.get("distribution", "log_uniform_values") != "log_uniform_values":
        raise ValueError(f"{spec}: the distribution can be log_uniform_values, or left out")
    low, high, is_log = spec["min"], spec["max"], "distribution" in spec
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (is_log and low <= 0):
        raise ValueError(f"--{option}: {spec}: min is below max, finite, and above 0 for logs")
    if isinstance(low, int) and isinstance(high, int) and not is_log:
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=is_log)
