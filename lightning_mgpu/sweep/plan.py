"""A sweep's YAML, in W&B's format: https://docs.wandb.ai/guides/sweeps/sweep-config-keys"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.runs.errors import UsageError

METHODS = ("grid", "random", "bayes")
KEYS = {"program", "command", "method", "metric", "parameters", "name", "project", "entity", "description", "run_cap"}
KEYS |= {"early_terminate"}
DISTRIBUTIONS: dict[str, Callable[..., BaseDistribution]] = {
    "uniform": FloatDistribution,
    "log_uniform_values": partial(FloatDistribution, log=True),
    "int_uniform": IntDistribution,
}
TRIAL = "--trainer.callbacks+=lightning_mgpu.sweep.Trial"


@dataclass(frozen=True)
class Plan:
    """A sweep: `space` varies, by the dotted name of the option; `fit` holds the arguments that all trials share."""

    name: str
    method: str
    metric: str
    direction: Literal["minimize", "maximize"]
    early_terminate: dict[str, Any]
    fit: list[str]
    space: dict[str, BaseDistribution]
    points: list[dict[str, Any]]  # of a grid, the last parameter varies fastest; else none, Optuna draws
    num_trials: int


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
    method, goal = sweep["method"], sweep["metric"].get("goal", "minimize")
    if method not in METHODS or goal not in ("minimize", "maximize"):
        raise ValueError(f"method: {method}, goal: {goal}: choose grid, random or bayes, and minimize or maximize")
    early = sweep.get("early_terminate") or {}
    if early and early.get("type") != "hyperband":
        raise ValueError(f"early_terminate: type: {early.get('type')}: choose hyperband, as W&B does")
    fixed = {name: given["value"] for name, given in sweep["parameters"].items() if "value" in given}
    space = {name: _distribution(name, given) for name, given in sweep["parameters"].items() if name not in fixed}
    command = [str(word) for word in sweep.get("command", ["fit"])]  # what W&B's agent gives `fit`
    fit = [word for word in command[command.index("fit") + 1 :] if word != TRIAL and not word.startswith("${")]
    fit += [f"--wandb.{key}={sweep[key]}" for key in ("project", "entity") if key in sweep]
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
    name = str(sweep.get("name", stem))
    return Plan(name, method, sweep["metric"]["name"], goal, early, fit, space, points, num_trials)


def _distribution(name: str, given: dict[str, Any]) -> BaseDistribution:
    if "values" in given:
        return CategoricalDistribution(given["values"])
    bounds = [given.get("min"), given.get("max")]
    kind = given.get("distribution", "int_uniform" if all(isinstance(x, int) for x in bounds) else "uniform")
    if None in bounds or kind not in DISTRIBUTIONS:
        raise ValueError(f"{name}: give value, values, or min and max; distribution: {', '.join(DISTRIBUTIONS)}")
    return DISTRIBUTIONS[kind](*bounds)


def as_argument(name: str, value: Any) -> str:
    """An option as it stands on a command line: `null` and `true`, where Python writes None and True."""
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
