"""`python -m lightning_mgpu sweep`: many fits from one YAML; no account, no server.

python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.max_epochs=2
python -m lightning_mgpu sweep --config sweep/lenet_optimizer.yaml --sweep_dir sweeps/second

Every other argument is one of `fit`, the same for all trials. Further `--config` files are those of
`fit`. The same command again goes on where the sweep was stopped. In a second terminal it takes a
share of the trials. The YAML is in W&B's format:
https://docs.wandb.ai/guides/sweeps/sweep-config-keys
"""

import math
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mgpu.cli.project import command
from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.errors import ToolParser, UsageError

try:
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    from lightning_mgpu.sweep.trials import TRIAL, Sweep, as_argument
except ModuleNotFoundError as error:
    raise UsageError(f"a sweep needs Optuna: pip install optuna ({error})") from error

# keys of the YAML
NEEDED, READ = (("method", "metric", "parameters"), ("command", "program", "run_cap"))


def parser() -> ArgumentParser:
    prog, formatter = f"{command()} sweep", RawDescriptionHelpFormatter
    result = ToolParser(prog, description=__doc__, formatter_class=formatter, allow_abbrev=False)
    result.add_argument(
        "--config", action="append", required=True, help="the sweep's YAML, here or in configs/"
    )
    result.add_argument("--count", type=int, help="trials in all; goes before the YAML's run_cap")
    result.add_argument(
        "--sweep_dir", type=Path, help="where trials and results go; sweeps/YAML if left out"
    )
    return result


def main(arguments: Sequence[str]) -> None:
    """Entry point of `sweep`.

    Raises:
        UsageError: For arguments that make no sense, before any trial is run.
    """
    sweep = read_sweep(arguments)
    sweep.open()
    print(
        f"{sweep.num_trials} trials, in {sweep.dir}; Ctrl-C stops, the same command goes on",
        flush=True,
    )
    sweep.run()
    print(f"\n{sweep.write_report()}\nreport: {sweep.dir}/sweep.md, sweep.png", flush=True)


def read_sweep(arguments: Sequence[str]) -> Sweep:
    """The sweep that is meant.

    Raises:
        UsageError: If the YAML is no sweep, or asks for something that is not done here.
    """
    args, of_fit = parser().parse_known_args(arguments)
    config, *more = args.config
    yaml = read_config(config)
    try:
        if missing := [key for key in NEEDED if key not in yaml]:
            raise ValueError(f"it has no {' and no '.join(missing)}")
        method, metric, parameters = yaml["method"], yaml["metric"]["name"], yaml["parameters"]
        goal = yaml["metric"].get("goal", "minimize")
        if method not in ("grid", "random", "bayes") or goal not in ("minimize", "maximize"):
            raise ValueError(
                f"method: {method}, goal: {goal}: choose grid, random or bayes, and minimize or "
                "maximize"
            )
        fixed = {name: given["value"] for name, given in parameters.items() if "value" in given}
        space = {
            name: _distribution(name, given)
            for name, given in parameters.items()
            if name not in fixed
        }
        # what W&B's agent gives `fit`
        command = [str(word) for word in yaml.get("command", ["fit"])]
        fit = [
            word
            for word in command[command.index("fit") + 1 :]
            if word != TRIAL and not word.startswith("${")
        ]
        fit += [as_argument(name, value) for name, value in fixed.items()]
        num_trials = _num_trials(
            method, space, yaml.get("run_cap") if args.count is None else args.count
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--config={config} is no sweep: {error}") from error
    for name in (argument.removeprefix("--").partition("=")[0] for argument in of_fit):
        if name in (*space, "run_dir", "resume"):
            raise UsageError(f"--{name}: the sweep sets it for every trial; leave it out")
    if others := [key for key in yaml if key not in (*NEEDED, *READ)]:
        print(f"not read here, but by W&B: {', '.join(others)}", flush=True)
    fit += [*(as_argument("config", each) for each in more), *of_fit]
    return Sweep(
        args.sweep_dir or Path("sweeps", Path(config).stem),
        method,
        metric,
        goal,
        space,
        fit,
        num_trials,
    )


def _num_trials(method: str, space: dict[str, BaseDistribution], count: Any) -> int:
    if method == "grid":
        choices = [
            each.choices for each in space.values() if isinstance(each, CategoricalDistribution)
        ]
        if len(choices) < len(space):
            raise ValueError("a grid needs values for every parameter; or say method: random")
        num_points = math.prod(map(len, choices))
        count = num_points if count is None else min(num_points, count)
    if not isinstance(count, int) or count < 1:
        raise ValueError(
            f"method: {method} needs a number of trials: --count=20 here, or run_cap: 20 there"
        )
    return count


def _distribution(name: str, given: dict[str, Any]) -> BaseDistribution:
    if "values" in given:
        return CategoricalDistribution(given["values"])
    is_log = given.get("distribution") == "log_uniform_values"
    if not {"min", "max"} <= given.keys() or not (is_log or "distribution" not in given):
        raise ValueError(
            f"{name}: give value, values, or min and max; distribution: log_uniform_values, or none"
        )
    low, high = given["min"], given["max"]
    if isinstance(low, int) and isinstance(high, int) and not is_log:
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=is_log)
