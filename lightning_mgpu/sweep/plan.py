"""A sweep's YAML, in W&B's format: https://docs.wandb.ai/guides/sweeps/sweep-config-keys

Optuna draws the trials. So a parameter is one of Optuna's distributions, and `early_terminate` is one of its pruners.
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from lightning_mgpu.arguments import find_config
from lightning_mgpu.errors import UsageError

METHODS = ("grid", "random", "bayes")
KEYS = {"program", "command", "method", "metric", "parameters", "name", "project", "entity", "description", "run_cap"}
KEYS |= {"early_terminate"}
TRIAL = "--trainer.callbacks+=lightning_mgpu.sweep.Trial"


@dataclass(frozen=True)
class Plan:
    """A sweep.

    Args:
        fit: Arguments of `fit` that all trials share, those of parameters with one `value` included.
        space: What varies, by the dotted name of the option.
        num_trials: How many there are in all.
        early_terminate: W&B's settings of Hyperband, if any.
    """

    name: str
    method: str
    metric: str
    direction: str
    fit: list[str]
    space: dict[str, BaseDistribution]
    num_trials: int
    early_terminate: dict[str, Any]

    def point(self, index: int) -> dict[str, Any]:
        """What is not drawn of a trial: in a grid all of it. The last parameter varies fastest."""
        if self.method != "grid":
            return {}
        points = itertools.product(*map(_choices, self.space.values()))
        return dict(zip(self.space, next(itertools.islice(points, index, None))))

    def sampler(self, seed: int) -> BaseSampler:
        """What draws the rest. `constant_liar` keeps workers that run side by side away from each other."""
        return TPESampler(seed=seed, constant_liar=True) if self.method == "bayes" else RandomSampler(seed=seed)

    def pruner(self) -> BasePruner:
        """W&B's Hyperband compares a run at epochs `min_iter * eta^k` with those before it: successive halving."""
        options = self.early_terminate
        if not options:
            return NopPruner()
        eta = int(options.get("eta", 3))
        first = options.get("min_iter") or options.get("max_iter", 1) // eta ** options.get("s", 0)
        return SuccessiveHalvingPruner(min_resource=max(1, int(first)), reduction_factor=eta)


def read_plan(config: str, count: int | None = None) -> Plan:
    """Read a sweep's YAML, here or in `configs/`. `count` goes before its `run_cap`.

    Raises:
        UsageError: If it is no sweep, or asks for something that is not done here.
    """
    sweep = yaml.safe_load(Path(find_config(config)).read_text())
    try:
        return _plan(sweep, Path(config).stem, count)
    except (TypeError, KeyError) as error:
        raise UsageError(f"--config={config} is no sweep: {type(error).__name__}: {error}") from error
    except ValueError as error:  # Optuna's own, too
        raise UsageError(f"--config={config}: {error}") from error


def _plan(sweep: dict[str, Any], stem: str, count: int | None) -> Plan:
    if not isinstance(sweep, dict) or not sweep.keys() >= {"method", "metric", "parameters"}:
        raise ValueError("a sweep needs method, metric and parameters")
    if unknown := sweep.keys() - KEYS:
        raise ValueError(f"{min(unknown)}: not done here; known are {', '.join(sorted(KEYS))}")
    method, goal = sweep["method"], sweep["metric"].get("goal", "minimize")
    if method not in METHODS or goal not in ("minimize", "maximize"):
        raise ValueError(f"method: {method}, goal: {goal}: choose grid, random or bayes, and minimize or maximize")
    early = sweep.get("early_terminate") or {}
    if early and early.get("type") != "hyperband":
        raise ValueError(f"early_terminate: type: {early.get('type')}: choose hyperband, as W&B does")
    given = sweep["parameters"]
    fit = _arguments(sweep.get("command", []))
    fit += [f"--wandb.{key}={sweep[key]}" for key in ("project", "entity") if key in sweep]
    fit += [as_argument(name, options["value"]) for name, options in given.items() if "value" in options]
    space = {name: _distribution(name, options) for name, options in given.items() if "value" not in options}
    num_trials = count if count is not None else sweep.get("run_cap")
    if method == "grid":
        size = math.prod(len(_choices(distribution)) for distribution in space.values())
        num_trials = min(size, num_trials or size)
    if not isinstance(num_trials, int) or num_trials < 1:
        raise ValueError(f"a {method} sweep needs a number of trials: --count=20 here, or run_cap: 20 there")
    name = str(sweep.get("name", stem))
    return Plan(name, method, sweep["metric"]["name"], goal, fit, space, num_trials, early)


def _distribution(name: str, given: dict[str, Any]) -> BaseDistribution:
    """Raises ValueError for what Optuna has no distribution for."""
    if "values" in given:
        plain = (str, float, int, type(None))  # what Optuna can write down
        return CategoricalDistribution([x if isinstance(x, plain) else json.dumps(x) for x in given["values"]])
    if "min" not in given or "max" not in given:
        raise ValueError(f"{name}: give value, values, or min and max")
    low, high = given["min"], given["max"]
    kind = given.get("distribution", "int_uniform" if isinstance(low, int) and isinstance(high, int) else "uniform")
    try:
        if kind == "int_uniform":
            return IntDistribution(low, high)
        if kind in ("uniform", "log_uniform_values"):
            return FloatDistribution(low, high, log=kind != "uniform")
        if kind == "q_uniform":
            return FloatDistribution(low, high, step=given.get("q", 1))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    raise ValueError(f"{name}: distribution: {kind}: choose uniform, q_uniform, int_uniform or log_uniform_values")


def _choices(distribution: BaseDistribution) -> tuple[Any, ...]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    if isinstance(distribution, IntDistribution):
        return tuple(range(distribution.low, distribution.high + 1))
    raise ValueError("a grid needs values, or whole numbers from min to max; or say method: random")


def _arguments(command: list[str]) -> list[str]:
    """What W&B's agent would give `fit` beside the parameters. A sweep that is run here needs no command."""
    words = [str(word) for word in command]
    if words and "fit" not in words:
        raise ValueError(f"command: {' '.join(words)}: a sweep runs `fit` here; leave the command out")
    return [word for word in words[words.index("fit") + 1 :] if not word.startswith("${")] if words else []


def as_argument(name: str, value: Any) -> str:
    """An option as it stands on a command line: `null` and `true`, where Python writes None and True."""
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
