"""A sweep as W&B writes it in YAML, and its trials: every combination (`grid`), or draws (`random`).

A draw depends on the seed, the trial's number and the parameter's name alone: more trials change none before them.
The format: https://docs.wandb.ai/guides/sweeps/sweep-config-keys
"""

import json
import math
import random
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lightning_mgpu.cli.yaml_files import find_config
from lightning_mgpu.runs.errors import UsageError

METHODS = ("grid", "random", "bayes")
COMMAND = "command: [python, -m, lightning_mgpu, fit, '${args}']"
KEYS = ("program", "command", "method", "metric", "parameters", "name", "project", "entity", "description", "run_cap")
NOT_HERE = {"early_terminate": "only W&B's server stops trials early", "job": "that is W&B Launch's"}
# what a distribution needs, and what it may have with its default
DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "constant": (("value",), {}),
    "categorical": (("values",), {}),
    "categorical_w_probabilities": (("values", "probabilities"), {}),
    "int_uniform": (("min", "max"), {}),
    "uniform": (("min", "max"), {}),
    "q_uniform": (("min", "max"), {"q": 1.0}),
    "log_uniform_values": (("min", "max"), {}),
    "q_log_uniform_values": (("min", "max"), {"q": 1.0}),
    "normal": ((), {"mu": 0.0, "sigma": 1.0}),
    "q_normal": ((), {"mu": 0.0, "sigma": 1.0, "q": 1.0}),
    "log_normal": ((), {"mu": 0.0, "sigma": 1.0}),
    "q_log_normal": ((), {"mu": 0.0, "sigma": 1.0, "q": 1.0}),
}
Values = dict[str, Any]
"""The parameters of a trial by their dotted names."""


@dataclass(frozen=True)
class Parameter:
    """How one option varies.

    Args:
        options: `min`, `max`, `values` and the like, defaults included.
    """

    name: str
    distribution: str
    options: dict[str, Any]

    @property
    def is_log(self) -> bool:
        return "log_" in self.distribution

    @property
    def num_choices(self) -> int:
        """How many values there are; 0 where they cannot be counted."""
        p = self.options
        if self.distribution == "constant":
            return 1
        if self.distribution == "categorical":
            return len(p["values"])
        if self.distribution == "int_uniform":
            return int(p["max"] - p["min"] + 1)
        if self.distribution == "q_uniform":  # without the maximum, as W&B has it
            return math.ceil((p["max"] - p["min"]) / p["q"])
        return 0

    def choice(self, index: int) -> Any:
        """One of the values that can be counted, in order; they are never listed, there may be billions."""
        p = self.options
        if self.distribution == "constant":
            return p["value"]
        if self.distribution == "categorical":
            return p["values"][index]
        return p["min"] + index if self.distribution == "int_uniform" else readable(p["min"] + index * p["q"])

    def draw(self, rng: random.Random) -> Any:
        p, kind = self.options, self.distribution.removeprefix("q_")
        if kind == "constant":
            return p["value"]
        if kind.startswith("categorical"):
            return rng.choices(p["values"], p.get("probabilities"))[0]
        if kind == "int_uniform":
            return rng.randint(p["min"], p["max"])
        if kind == "uniform":
            x = rng.uniform(p["min"], p["max"])
        elif kind == "log_uniform_values":
            x = math.exp(rng.uniform(math.log(p["min"]), math.log(p["max"])))
        else:
            x = (rng.gauss if kind == "normal" else rng.lognormvariate)(p["mu"], p["sigma"])
        return readable(round(x / p["q"]) * p["q"] if "q" in p else x)


@dataclass(frozen=True)
class Plan:
    """A sweep.

    Args:
        arguments: Of `fit`, the same for every trial.
        parameters: Sorted by name, which is the order the W&B agent gives them in.
        num_trials: `None` if it has no end.
    """

    name: str
    method: str
    metric: str
    maximize: bool
    arguments: list[str]
    parameters: list[Parameter]
    num_trials: int | None
    notes: list[str]

    def trial(self, index: int, seed: int) -> Values:
        """The values of a trial of a `grid` or `random` sweep."""
        if self.method == "grid":
            values: Values = {}
            for parameter in reversed(self.parameters):  # the last one varies fastest, as in itertools.product
                index, place = divmod(index, parameter.num_choices)
                values[parameter.name] = parameter.choice(place)
            return dict(reversed(values.items()))
        return {p.name: p.draw(random.Random(f"{seed}/{index}/{p.name}")) for p in self.parameters}


def read_plan(config: str, count: int | None = None) -> Plan:
    """Read a sweep's YAML, here or in `configs/`; `count` goes before its `run_cap`.

    Raises:
        UsageError: If there is none, or it asks for something that is not done here.
    """
    if config.startswith("{"):
        raise UsageError(f"--config={config}: a sweep is a YAML file, here or in configs/, not its contents")
    sweep: dict[str, Any] = yaml.safe_load(Path(find_config(config)).read_text())

    def refuse(what: str) -> UsageError:
        return UsageError(f"--config={config}: {what}")

    if missing := [key for key in ("method", "metric", "parameters", "command") if key not in sweep]:
        raise refuse(f"no {missing[0]}; a sweep needs method, metric, parameters and {COMMAND}")
    notes = [f"{key} is left out here: {why}" for key, why in NOT_HERE.items() if key in sweep]
    if unknown := [str(key) for key in sweep if key not in (*KEYS, *NOT_HERE)]:
        close = get_close_matches(unknown[0], KEYS, n=1)
        near = f" (did you mean {close[0]}?)" if close else f"; those a local sweep takes are {', '.join(KEYS)}"
        raise refuse(f"{unknown[0]}: no such key{near}")
    method, metric = sweep["method"], sweep["metric"]
    if method not in METHODS:
        raise refuse(f"method: {method}: choose one of {', '.join(METHODS)}")
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str) or metric.keys() - {"name", "goal"}:
        raise refuse("metric needs a name and a goal, such as {name: val_acc, goal: maximize}, and nothing else")
    if (goal := metric.get("goal", "minimize")) not in ("minimize", "maximize"):
        raise refuse(f"metric goal: {goal}: choose minimize or maximize")
    if not isinstance(sweep["parameters"], dict) or not sweep["parameters"]:
        raise refuse("parameters needs options by name, such as model.optimizer.lr: {values: [0.1, 0.2]}")
    run_cap = sweep.get("run_cap") if count is None else count
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        raise (
            refuse(f"run_cap: {run_cap}: choose 1 or more")
            if count is None
            else UsageError(f"--count={count}: choose 1 or more")
        )
    try:
        parameters = [read_parameter(str(name), options) for name, options in sorted(sweep["parameters"].items())]
        arguments = fit_arguments(sweep["command"])
    except ValueError as error:
        raise refuse(str(error)) from error
    if method == "grid":
        if endless := [parameter for parameter in parameters if not parameter.num_choices]:
            raise refuse(
                f"{endless[0].name}: a grid needs values, not {endless[0].distribution}; or say method: random"
            )
        size = math.prod(parameter.num_choices for parameter in parameters)
        run_cap = min(size, run_cap or size)
    elif run_cap is None:
        raise refuse(f"a {method} sweep has no end: say how many trials, with --count=20 here or run_cap: 20 there")
    tracking = [f"--wandb.{key}={sweep[key]}" for key in ("project", "entity") if key in sweep]
    name = str(sweep.get("name", Path(config).stem))
    return Plan(name, method, metric["name"], goal == "maximize", [*arguments, *tracking], parameters, run_cap, notes)


def read_parameter(name: str, given: Any) -> Parameter:
    """A parameter from its YAML, with the distribution that W&B takes where none is said.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(given, dict):
        raise ValueError(f"{name}: {given}: write {{value: {given}}}, or values, or min and max")
    if "parameters" in given:
        raise ValueError(f"{name} is nested: write the dotted name of the option instead, {name}.lr: {{values: [...]}}")
    options = dict(given)
    kind = str(options.pop("distribution", _usual_distribution(options)))
    if kind not in DISTRIBUTIONS:
        near = f"{kind}_values" if f"{kind}_values" in DISTRIBUTIONS else ", ".join(DISTRIBUTIONS)
        raise ValueError(f"{name}: distribution: {kind}: not done here; choose {near}")
    needed, defaults = DISTRIBUTIONS[kind]
    if wrong := [*(set(needed) - options.keys()), *(options.keys() - {*needed, *defaults})]:
        takes = ", ".join([*needed, *defaults])
        raise ValueError(f"{name}: {wrong[0]}: {kind} takes {takes}; give value, values, or min and max")
    options = {**defaults, **options}
    for key in options.keys() & {"min", "max", "q", "mu", "sigma"}:
        if isinstance(options[key], bool) or not isinstance(options[key], (int, float)):
            raise ValueError(f"{name}: {key}: {options[key]!r} is no number; YAML takes 0.001 or 1.0e-3 for one")
    for key in options.keys() & {"values", "probabilities"}:
        if not isinstance(options[key], list) or not options[key]:
            raise ValueError(f"{name}: {key}: {options[key]!r} is no list")
    if kind == "int_uniform" and not all(type(options[key]) is int for key in ("min", "max")):
        raise ValueError(
            f"{name}: {kind} goes from one whole number to another, not from {options['min']} to {options['max']}"
        )
    if "min" in options and options["min"] >= options["max"]:
        raise ValueError(f"{name}: min: {options['min']} is not below max: {options['max']}")
    if kind.endswith("log_uniform_values") and options["min"] <= 0:
        raise ValueError(f"{name}: min: {options['min']}: {kind} begins above 0")
    if options.get("q", 1) <= 0:
        raise ValueError(f"{name}: q: {options['q']}: choose one above 0")
    if kind == "categorical_w_probabilities" and len(options["values"]) != len(options["probabilities"]):
        raise ValueError(f"{name}: as many probabilities as values are needed")
    return Parameter(name, kind, options)


def _usual_distribution(options: dict[str, Any]) -> str:
    if "value" in options:
        return "constant"
    if "values" in options:
        return "categorical_w_probabilities" if "probabilities" in options else "categorical"
    return "int_uniform" if all(type(options.get(key)) is int for key in ("min", "max")) else "uniform"


def fit_arguments(command: Any) -> list[str]:
    """What a sweep's command gives to `fit` beside the parameters.

    Raises:
        ValueError: If it is not this package's `fit`.
    """
    words = [str(word) for word in command] if isinstance(command, list) else []
    if (
        "fit" not in words
        or "${args}" not in words
        or words[words.index("fit") - 1] not in ("lightning_mgpu", "lightning-mgpu")
    ):
        raise ValueError(f"command: {command}: a local sweep runs `fit` of this package; write {COMMAND}")
    arguments = [word for word in words[words.index("fit") + 1 :] if word != "${args}"]
    if macros := [word for word in arguments if word.startswith("${")]:
        raise ValueError(f"command: {macros[0]} is filled in by the W&B agent alone; a local sweep takes ${{args}}")
    return arguments


def as_argument(value: Any) -> str:
    """A value as it stands on a command line: `null` and `true`, where Python writes None and True."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def readable(x: float) -> float:
    """Six digits are enough for a hyperparameter."""
    return float(f"{x:.6g}")
