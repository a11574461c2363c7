"""A sweep's YAML, in W&B's format: https://docs.wandb.ai/guides/sweeps/sweep-config-keys"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.sweep.trials import TRIAL, Sweep, as_argument

NEEDED, READ = ("method", "metric", "parameters"), ("command", "program", "run_cap")


def read_sweep(config: str, count: int | None, sweep_dir: Path | None, more: Sequence[str]) -> Sweep:
    """Read a sweep's YAML, here or in `configs/`. `count` goes before its `run_cap`; `more` is for every `fit`.

    Raises:
        UsageError: If it is no sweep, or asks for something that is not done here.
    """
    sweep = read_config(config)
    try:
        if missing := [key for key in NEEDED if key not in sweep]:
            raise ValueError(f"it has no {' and no '.join(missing)}")
        method, metric, parameters = sweep["method"], sweep["metric"]["name"], sweep["parameters"]
        goal = sweep["metric"].get("goal", "minimize")
        if method not in ("grid", "random", "bayes") or goal not in ("minimize", "maximize"):
            raise ValueError(f"method: {method}, goal: {goal}: choose grid, random or bayes, and minimize or maximize")
        fixed = {name: given["value"] for name, given in parameters.items() if "value" in given}
        space = {name: _distribution(name, given) for name, given in parameters.items() if name not in fixed}
        command = [str(word) for word in sweep.get("command", ["fit"])]  # what W&B's agent gives `fit`
        fit = [word for word in command[command.index("fit") + 1 :] if word != TRIAL and not word.startswith("${")]
        fit += [*(as_argument(name, value) for name, value in fixed.items()), *more]
        num_trials = _num_trials(method, space, sweep.get("run_cap") if count is None else count)
        found = Sweep(sweep_dir or Path("sweeps", Path(config).stem), method, metric, goal, space, fit, num_trials)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--config={config} is no sweep: {error}") from error
    if others := [key for key in sweep if key not in (*NEEDED, *READ)]:
        print(f"not read here, but by W&B: {', '.join(others)}", flush=True)
    return found


def _num_trials(method: str, space: dict[str, BaseDistribution], count: Any) -> int:
    if method == "grid":
        choices = [each.choices for each in space.values() if isinstance(each, CategoricalDistribution)]
        if len(choices) < len(space):
            raise ValueError("a grid needs values for every parameter; or say method: random")
        num_points = math.prod(map(len, choices))
        count = num_points if count is None else min(num_points, count)
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"method: {method} needs a number of trials: --count=20 here, or run_cap: 20 there")
    return count


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
