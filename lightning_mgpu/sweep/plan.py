"""A sweep's YAML, in W&B's format: https://docs.wandb.ai/guides/sweeps/sweep-config-keys"""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.runs.errors import UsageError

NEEDED, READ = ("method", "metric", "parameters"), ("command", "program", "run_cap")
TRIAL = "--trainer.callbacks+=lightning_mgpu.sweep.Trial"


@dataclass(frozen=True)
class Plan:
    """A sweep: `space` varies, by the dotted name of the option; `fit` holds the arguments that all trials share."""

    method: str
    metric: str
    direction: Literal["minimize", "maximize"]
    fit: list[str]
    space: dict[str, BaseDistribution]
    num_trials: int
    asked: list[Any]  # what may not change when a sweep goes on


def read_plan(config: str, count: int | None = None) -> Plan:
    """Read a sweep's YAML, here or in `configs/`. `count` goes before its `run_cap`.

    Raises:
        UsageError: If it is no sweep, or asks for something that is not done here.
    """
    sweep = read_config(config)
    try:
        return _plan(sweep, count)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--config={config} is no sweep: {error}") from error


def _plan(sweep: dict[str, Any], count: int | None) -> Plan:
    if missing := [key for key in NEEDED if key not in sweep]:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    if others := [key for key in sweep if key not in (*NEEDED, *READ)]:
        print(f"not read here, but by W&B: {', '.join(others)}", flush=True)
    method, metric, goal = sweep["method"], sweep["metric"]["name"], sweep["metric"].get("goal", "minimize")
    if method not in ("grid", "random", "bayes") or goal not in ("minimize", "maximize"):
        raise ValueError(f"method: {method}, goal: {goal}: choose grid, random or bayes, and minimize or maximize")
    fixed = {name: given["value"] for name, given in sweep["parameters"].items() if "value" in given}
    space = {name: _distribution(name, given) for name, given in sweep["parameters"].items() if name not in fixed}
    command = [str(word) for word in sweep.get("command", ["fit"])]  # what W&B's agent gives `fit`
    fit = [word for word in command[command.index("fit") + 1 :] if word != TRIAL and not word.startswith("${")]
    fit += [as_argument(name, value) for name, value in fixed.items()]
    num_trials = count if count is not None else sweep.get("run_cap")
    if method == "grid":
        if not all(isinstance(each, CategoricalDistribution) for each in space.values()):
            raise ValueError("a grid needs values for every parameter; or say method: random")
        num_points = math.prod(len(sweep["parameters"][name]["values"]) for name in space)
        num_trials = min(num_points, num_trials or num_points)
    if not isinstance(num_trials, int) or num_trials < 1:
        raise ValueError(f"method: {method} needs a number of trials: --count=20 here, or run_cap: 20 there")
    return Plan(method, metric, goal, fit, space, num_trials, [sweep[key] for key in NEEDED])


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
