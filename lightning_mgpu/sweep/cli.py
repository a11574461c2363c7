"""Many fits from one YAML; no account, no server.

python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.max_epochs=2

Every other argument is one of `fit`, the same for all trials. The same command again goes on where
the sweep was stopped. In a second terminal it takes a share of the trials. The YAML is in W&B's
format: https://docs.wandb.ai/guides/sweeps/sweep-config-keys
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna

from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.sweep.trials import Sweep, as_argument
from lightning_mgpu.tools import UsageError, make_parser

KEYS = ("method", "metric", "parameters", "run_cap", "program", "command")


def sweep_command(arguments: Sequence[str]) -> None:
    """Entry point of `sweep`."""
    if int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1))) > 1:
        raise UsageError("sweep starts the processes itself: start it without torchrun or srun")
    read_sweep(arguments).run()


def read_sweep(arguments: Sequence[str]) -> Sweep:
    """Make a `Sweep` of the command line and its YAML."""
    parser = make_parser("sweep", __doc__)
    parser.add_argument("--config", action="append", required=True, help="first the sweep's YAML")
    parser.add_argument("--count", type=int, help="trials in all; wins over the YAML's run_cap")
    parser.add_argument("--sweep_dir", type=Path, help="where trials go; default: sweeps/YAML")
    options, fit_args = parser.parse_known_args(arguments)
    config, *fit_configs = options.config
    yaml = read_config(config)
    if ignored := [key for key in yaml if key not in KEYS]:
        print(f"not read here, but by W&B: {', '.join(ignored)}", flush=True)
    try:
        words = yaml.get("command", ["fit"])  # for W&B's agent: what follows `fit` is for all
        shared = [str(word) for word in words[words.index("fit") + 1 :] if word != "${args}"]
        specs = yaml["parameters"]
        shared += [
            as_argument(name, specs[name]["value"]) for name in specs if "value" in specs[name]
        ]
        space = {name: distribution(specs[name]) for name in specs if "value" not in specs[name]}
        count, method = options.count or yaml.get("run_cap"), yaml["method"]
        if method != "grid" and (count is None or method not in ("random", "bayes")):
            raise ValueError("method: grid, or random or bayes with --count=20 (here: run_cap: 20)")
        metric, goal = yaml["metric"]["name"], yaml["metric"].get("goal", "minimize")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--config={config} is not a sweep: {error!r}") from error
    if given := {*space, "run_dir", "resume"} & {arg[2:].partition("=")[0] for arg in fit_args}:
        raise UsageError(f"--{given.pop()}: the sweep sets it for every trial; leave it out")
    shared += [*(f"--config={path}" for path in fit_configs), *fit_args]
    sweep_dir = options.sweep_dir or Path("sweeps", Path(config).stem)
    return Sweep(sweep_dir, metric, goal, method, space, shared, count)


def distribution(spec: dict[str, Any]) -> optuna.distributions.BaseDistribution:
    if "values" in spec:
        return optuna.distributions.CategoricalDistribution(spec["values"])
    if spec.get("distribution", "log_uniform_values") != "log_uniform_values":
        raise ValueError(f"{spec}: the distribution can be log_uniform_values, or left out")
    low, high, is_log = spec["min"], spec["max"], "distribution" in spec
    if isinstance(low, int) and isinstance(high, int) and not is_log:
        return optuna.distributions.IntDistribution(low, high)
    return optuna.distributions.FloatDistribution(low, high, log=is_log)
