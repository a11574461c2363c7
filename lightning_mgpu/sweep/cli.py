"""Many fits from one YAML; no account, no server.

python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.max_epochs=2
python -m lightning_mgpu sweep --config sweep/lenet_optimizer.yaml --sweep_dir sweeps/second

Every other argument is one of `fit`, the same for all trials. Further `--config` files are those of
`fit`. The same command again goes on where the sweep was stopped. In a second terminal it takes a
share of the trials. The YAML is in W&B's format:
https://docs.wandb.ai/guides/sweeps/sweep-config-keys
"""

import math
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from lightning_mgpu.cli.checks import launched
from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.commands import ToolParser
from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import command
from lightning_mgpu.sweep.trials import TRIAL, Sweep, as_argument

# keys of the YAML; `program` and `command` are for W&B's agent
REQUIRED_KEYS = ("method", "metric", "parameters")
OPTIONAL_KEYS = ("command", "program", "run_cap")


def sweep_parser() -> ArgumentParser:
    parser = ToolParser(f"{command()} sweep", __doc__)
    parser.add_argument(
        "--config", action="append", required=True, help="the sweep's YAML, here or in configs/"
    )
    parser.add_argument("--count", type=int, help="trials in all; wins over the YAML's run_cap")
    parser.add_argument(
        "--sweep_dir", type=Path, help="where trials and results go; default: sweeps/YAML"
    )
    return parser


def sweep_command(arguments: Sequence[str]) -> None:
    """Entry point of `sweep`.

    Raises:
        UsageError: For arguments that make no sense, before any trial is run.
    """
    sweep = read_sweep(arguments)
    if launched()[0] > 1:
        raise UsageError(
            "sweep runs alone: of the processes that torchrun or SLURM has started, each would run "
            "other trials. Trials in several processes: --trainer.strategy.processes=2"
        )
    sweep.create_or_check_dir()
    start = f"{sweep.num_trials} trials, in {sweep.dir}; Ctrl-C stops, the same command goes on"
    print(start, flush=True)
    sweep.run()
    print(f"\n{sweep.write_report()}\nreport: {sweep.dir}/sweep.md, sweep.png", flush=True)


def read_sweep(arguments: Sequence[str]) -> Sweep:
    """Make a `Sweep` of the command line and its YAML.

    Raises:
        UsageError: If the YAML is not a sweep's, or asks for something that only W&B can do.
    """
    args, fit_args = sweep_parser().parse_known_args(arguments)
    config, *fit_configs = args.config
    yaml = read_config(config)
    try:
        sweep = _from_yaml(yaml, args.sweep_dir or Path("sweeps", Path(config).stem), args.count)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--config={config} is not a sweep: {error}") from error
    for name in (argument.removeprefix("--").partition("=")[0] for argument in fit_args):
        if name in (*sweep.space, "run_dir", "resume"):
            raise UsageError(f"--{name}: the sweep sets it for every trial; leave it out")
    if ignored := [key for key in yaml if key not in (*REQUIRED_KEYS, *OPTIONAL_KEYS)]:
        print(f"not read here, but by W&B: {', '.join(ignored)}", flush=True)
    sweep.fit_args += [*(as_argument("config", path) for path in fit_configs), *fit_args]
    return sweep


def _from_yaml(yaml: dict[str, Any], sweep_dir: Path, count: int | None) -> Sweep:
    if missing := [key for key in REQUIRED_KEYS if key not in yaml]:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    method, goal = yaml["method"], yaml["metric"].get("goal", "minimize")
    if method not in ("grid", "random", "bayes") or goal not in ("minimize", "maximize"):
        raise ValueError(
            f"method: {method}, goal: {goal}: choose grid, random or bayes, and minimize or "
            "maximize"
        )
    fit_args, space = _fit_args_in_command(yaml), {}
    for name, spec in yaml["parameters"].items():
        if "value" in spec:
            fit_args.append(as_argument(name, spec["value"]))
        else:
            space[name] = _distribution(name, spec)
    num_trials = _num_trials(method, space, yaml.get("run_cap") if count is None else count)
    return Sweep(sweep_dir, method, yaml["metric"]["name"], goal, space, fit_args, num_trials)


def _fit_args_in_command(yaml: dict[str, Any]) -> list[str]:
    """Arguments of `fit` in the command for W&B's agent, without `${args}` and the callback."""
    words = [str(word) for word in yaml.get("command", ["fit"])]
    words = words[words.index("fit") + 1 :]
    return [word for word in words if word != TRIAL and not word.startswith("${")]


def _num_trials(method: str, space: dict[str, BaseDistribution], count: Any) -> int:
    if method == "grid":
        grids = [each for each in space.values() if isinstance(each, CategoricalDistribution)]
        if len(grids) < len(space):
            raise ValueError("a grid needs values for every parameter; or say method: random")
        num_points = math.prod(len(each.choices) for each in grids)
        count = num_points if count is None else min(num_points, count)
    if not isinstance(count, int) or count < 1:
        raise ValueError(
            f"method: {method} needs a number of trials: --count=20 here, or run_cap: 20 there"
        )
    return count


def _distribution(name: str, spec: dict[str, Any]) -> BaseDistribution:
    if "values" in spec:
        return CategoricalDistribution(spec["values"])
    is_log = spec.get("distribution") == "log_uniform_values"
    if not {"min", "max"} <= spec.keys() or not (is_log or "distribution" not in spec):
        raise ValueError(
            f"{name}: give value, values, or min and max; distribution: log_uniform_values, or none"
        )
    low, high = spec["min"], spec["max"]
    if isinstance(low, int) and isinstance(high, int) and not is_log:
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=is_log)
