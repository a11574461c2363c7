"""Search hyperparameters: one YAML file, one `fit` per trial; no account or server.

    python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.max_epochs=2

Other arguments are passed to every `fit`. Run the same command again to continue an interrupted
sweep, or in several terminals to share its trials. See docs/runs.md.
"""

import itertools
import json
import math
import os
import shutil
import sys
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler

from lightning_mgpu.cli.list_runs import find_runs, runs_command
from lightning_mgpu.cli.options import one_string_per_option, options_by_name
from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.tools import LAST, UsageError, atomic_write, make_parser, program, run_in_group


def sweep_command(arguments: list[str]) -> None:
    parser = make_parser("sweep", __doc__)
    add = parser.add_argument
    text = "YAML file of the sweep; further files are passed to `fit`"
    add("--config", action="append", required=True, metavar="FILE", help=text)
    add("--count", type=int, metavar="N", help="number of trials (default: `run_cap`)")
    add("--sweep_dir", type=Path, metavar="DIR", help="directory of trials (default: sweeps/FILE)")
    options, fit_args = parser.parse_known_args(arguments)
    config, *fit_configs = options.config
    fit_args = [*(f"--config={path}" for path in fit_configs), *fit_args]
    try:
        sweep = Sweep(read_config(config), options.count, fit_args)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--config={config} is not a sweep: {error!r}") from error
    directory = options.sweep_dir or Path("sweeps", Path(config).stem)
    directory.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_RUN_GROUP", directory.name)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    values = set()
    # the second round waits for other terminals and continues their unfinished trials
    for flag, number in itertools.product((LOCK_NB, 0), sweep.numbers):
        path = directory / f"trial_{number:03}.json"
        with path.with_suffix(".log").open("a") as log, suppress(BlockingIOError):
            flock(log, LOCK_EX | flag)  # `fit` inherits the lock and may outlive us
            values.add(sweep.run_trial(number, path, log))
    if values == {None}:
        raise UsageError(f"no trial logged {sweep.metric}: see the logs, then delete {directory}")
    runs_command([str(directory), f"--sort={sweep.metric}"])


class Sweep:
    """The trials of a sweep: each has a JSON file, a log and a run directory."""

    def __init__(self, yaml: dict[str, Any], count: int | None, fit_args: list[str]) -> None:
        self.method, specs = yaml["method"], yaml["parameters"]
        self.metric, self.goal = yaml["metric"]["name"], yaml["metric"]["goal"]
        if self.goal not in ("minimize", "maximize"):
            raise ValueError(f"goal: {self.goal}: must be minimize or maximize")
        if "early_terminate" in yaml:
            raise ValueError("early_terminate: not supported, trials run to their end: remove it")
        # in the YAML's order, as --model comes before --model.lr
        self.space = {name: distribution(name, spec) for name, spec in specs.items()}
        fixed = [name for name in specs if "value" in specs[name]]
        fixed = [f"--{name}={self.space.pop(name).choices[0]}" for name in fixed]
        if not self.space:
            raise ValueError("parameters: at least one must have values, or min and max")
        count = count or yaml.get("run_cap")
        if self.method == "grid":  # the last parameter varies fastest
            self.points = [*itertools.product(*(x.choices for x in self.space.values()))]
            count = count or len(self.points)
            if count > len(self.points):
                raise ValueError(f"{count} trials: the grid has {len(self.points)} points")
        elif self.method not in ("random", "bayes") or not count:
            raise ValueError("method: must be grid, or random or bayes with --count=N")
        self.numbers = range(count)
        command = yaml.get("command", ["fit"])  # of W&B's agent
        words = [str(x) for x in command[command.index("fit") + 1 :] if x != "${args}"]
        given = one_string_per_option([*words, *fixed, *fit_args])
        flags = {arg[2:].partition("=")[0] for arg in given}
        if taken := flags & {*self.space, "run_dir", "resume"}:
            raise UsageError(f"--{taken.pop()}: the sweep sets this option; remove it")
        if options_by_name(given).get("data.val_size") in (0, "0"):
            raise UsageError("--data.val_size=0: trials would be tuned on the test set")
        # the table of runs shows the epoch with the best value of this metric
        best = [f"--checkpoint.monitor={self.metric}", f"--checkpoint.mode={self.goal[:3]}"]
        self.args = ["--output.curve=false", *best, *given]
        self.settings = str([self.method, self.space, self.args])

    def run_trial(self, number: int, path: Path, log: IO[str]) -> float | None:
        """Run a trial unless it has ended; return the metric of its best epoch, if any."""
        trial = json.loads(path.read_text()) if path.exists() else self.draw(number, path)
        if trial["sweep"] != self.settings:
            raise UsageError(f"{path.parent} contains another sweep: use another --sweep_dir")
        if "value" in trial:
            return trial["value"]
        with atomic_write(path) as part:
            part.write_text(json.dumps(trial))
        args = [f"--{option}={trial['params'][option]}" for option in self.space]
        print(f"{path.stem}:", *args, f"(log: {log.name})", flush=True)
        run_dir = path.with_suffix("")
        args = [*self.args, *args, f"--run_dir={run_dir}"]
        run = find_runs(run_dir).get(run_dir, {})
        if run.get("state") in (None, "unfinished", "interrupted"):
            if (run_dir / "checkpoints" / LAST).exists():
                args = [f"--resume={run_dir}"]
            else:
                shutil.rmtree(run_dir, ignore_errors=True)
            # the last argument wins: a trial must not see the test set
            command = [sys.executable, "-m", program(), "fit", *args, "--output.test=false"]
            run_in_group(command, log)
            run = find_runs(run_dir).get(run_dir, {})
        has_ended = run.get("state") in ("finished", "stopped")
        value = run.get(self.metric, math.nan) if has_ended else math.nan
        trial["value"] = value if math.isfinite(value) else None
        with atomic_write(path) as part:
            part.write_text(json.dumps(trial))
        print(f"{path.stem}: {self.metric} {value:.4f}", flush=True)
        return trial["value"]

    def draw(self, number: int, path: Path) -> dict[str, Any]:
        """A new trial: random, or, with `bayes`, based on earlier trials."""
        study = optuna.create_study(direction=self.goal, sampler=TPESampler(seed=number))
        for file in path.parent.glob("trial_*.json") if self.method == "bayes" else ():
            trial = json.loads(file.read_text())
            if trial.get("value") is not None:
                del trial["sweep"]
                study.add_trial(optuna.create_trial(distributions=self.space, **trial))
        params = study.ask(self.space).params
        if self.method == "grid":
            params = dict(zip(self.space, self.points[number]))
        return {"sweep": self.settings, "params": params}


def distribution(option: str, spec: dict[str, Any]) -> Any:
    if spec.keys() in ({"value"}, {"values"}):
        values = spec.get("values", [spec.get("value")])
        texts = [x if isinstance(x, str) else json.dumps(x) for x in values]
        return CategoricalDistribution(texts)
    is_log = spec.get("distribution") == "log_uniform_values"
    low, high = spec.get("min", math.nan), spec.get("max", math.nan)
    if len(spec) != 2 + is_log or not (0 if is_log else -1e300) < low < high < 1e300:
        raise ValueError(f"--{option}: use value, values, or min < max (log: > 0), not {spec}")
    if isinstance(low, int) and isinstance(high, int) and not is_log:
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=is_log)
