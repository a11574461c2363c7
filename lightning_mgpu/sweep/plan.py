"""A sweep's YAML, in W&B's format: https://docs.wandb.ai/guides/sweeps/sweep-config-keys"""

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.runs.errors import UsageError

METHODS, GOALS = ("grid", "random", "bayes"), ("minimize", "maximize")
KEYS = {"program", "command", "method", "metric", "parameters", "name", "project", "entity", "description", "run_cap"}
KEYS |= {"early_terminate"}
TRIAL = "--trainer.callbacks+=lightning_mgpu.sweep.Trial"


@dataclass(frozen=True)
class Plan:
    """A sweep: `space` varies, by the dotted name of the option; `fit` holds the arguments that all trials share."""

    name: str
    method: str
    metric: str
    direction: Literal["minimize", "maximize"]
    fit: list[str]
    space: dict[str, BaseDistribution]
    points: list[dict[str, Any]]  # of a grid, the last parameter varies fastest; else none, Optuna draws
    num_trials: int
    asked: dict[str, Any]  # what may not change when a sweep goes on


def read_plan(config: str, count: int | None = None) -> Plan:
    """Read a sweep's YAML, here or in `configs/`. `count` goes before its `run_cap`.

    Raises:
        UsageError: If it is no sweep, or asks for something that is not done here.
    """
    sweep = read_config(config)
    try:
        return _plan(sweep, Path(config).stem, count)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--config={config} is no sweep: {error}") from error


def _plan(sweep: dict[str, Any], stem: str, count: int | None) -> Plan:
    if not {"method", "metric", "parameters"} <= sweep.keys() <= KEYS:
        raise ValueError(f"it needs method, metric and parameters; all there are: {', '.join(sorted(KEYS))}")
    method, metric, goal = sweep["method"], sweep["metric"]["name"], sweep["metric"].get("goal", "minimize")
    if method not in METHODS or goal not in GOALS:
        raise ValueError(f"method: {method}, goal: {goal}: choose grid, random or bayes, and minimize or maximize")
    if "early_terminate" in sweep:
        print("early_terminate is left to W&B's agent: here every trial runs to its end", flush=True)
    fixed = {name: given["value"] for name, given in sweep["parameters"].items() if "value" in given}
    space = {name: _distribution(name, given) for name, given in sweep["parameters"].items() if name not in fixed}
    command = [str(word) for word in sweep.get("command", ["fit"])]  # what W&B's agent gives `fit`
    fit = [word for word in command[command.index("fit") + 1 :] if word != TRIAL and not word.startswith("${")]
    for key in {"project", "entity"} & sweep.keys():
        os.environ[f"WANDB_{key.upper()}"] = str(sweep[key])  # W&B's own variables, which the trials inherit
    fit += [as_argument(name, value) for name, value in fixed.items()]
    points: list[dict[str, Any]] = []
    num_trials = count if count is not None else sweep.get("run_cap")
    if method == "grid":
        choices = [each.choices for each in space.values() if isinstance(each, CategoricalDistribution)]
        if len(choices) < len(space):
            raise ValueError("a grid needs values for every parameter; or say method: random")
        points = [dict(zip(space, point)) for point in itertools.product(*choices)]
        num_trials = min(len(points), num_trials or len(points))
    if not isinstance(num_trials, int) or num_trials < 1:
        raise ValueError(f"method: {method} needs a number of trials: --count=20 here, or run_cap: 20 there")
    asked = {key: sweep[key] for key in ("method", "metric", "parameters")}
    return Plan(str(sweep.get("name", stem)), method, metric, goal, fit, space, points, num_trials, asked)


def _distribution(name: str, given: dict[str, Any]) -> BaseDistribution:
    if "values" in given:
        return CategoricalDistribution(given["values"])
    is_log = given.get("distribution") == "log_uniform_values"
    if not {"min", "max"} <= given.keys() or not (is_log or "distribution" not in given):
        raise ValueError(f"{name}: give value, values, or min and max; distribution: log_uniform_values, or none")
    low, high = given["min"], given["max"]
    if isinstance(low, int) and isinstance(high, int) and not is_log:
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=is_log)


def as_argument(name: str, value: Any) -> str:
    """An option as it stands on a command line: `null` and `true`, where Python writes None and True."""
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
