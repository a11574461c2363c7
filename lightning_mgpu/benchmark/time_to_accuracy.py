"""Seconds of training until a test accuracy is reached: what counts for a recipe, rather than seconds an epoch.

python -m lightning_mgpu benchmark time_to_accuracy --target 0.915 --config experiment/lenet_fast.yaml
python -m lightning_mgpu benchmark time_to_accuracy --target 0.8 --seeds 0 1 2 --model.optimizer.lr=0.3

What is not an option of its own goes to `fit`, with `--data.val_size=0`: the test set after every epoch. The clock
starts with the first step's batch, so that compiling counts and starting Python does not. Every seed has a process of
its own and trains to the end of its recipe.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_mgpu.benchmark.directory import new_directory
from lightning_mgpu.benchmark.runner import machine
from lightning_mgpu.callbacks.epoch_timer import EpochTimer
from lightning_mgpu.cli.errors import ToolParser, UsageError
from lightning_mgpu.runs.devices import own_devices, synchronize
from lightning_mgpu.runs.files import replace_text
from lightning_mgpu.runs.processes import run_in_group
from lightning_mgpu.runs.redact import redact_arguments

PROG = "python -m lightning_mgpu benchmark time_to_accuracy"
CLOCKS = {"seconds": "validation excluded", "seconds_with_validation": "included"}


class AccuracyClock(Callback):
    """Writes accuracy and time of every epoch to a JSON file; validation runs on the test set.

    Args:
        path: The file: a list of validations, each with `epoch` (from 1), `accuracy` (fraction), `seconds` (of
            training, by the run's `EpochTimer`) and `seconds_with_validation` (of everything since the first batch,
            checkpoints and pictures too).
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.epochs: list[dict[str, float]] = []
        self._started = 0.0
        self._before = 0.0  # seconds, of a run that was stopped and goes on

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "seconds_with_validation": time.perf_counter() - self._started}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs, self._before = list(state_dict["epochs"]), state_dict["seconds_with_validation"]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = _now(trainer) - self._before

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        timer = next(c for c in trainer.callbacks if isinstance(c, EpochTimer))  # type: ignore[attr-defined]
        times = {"seconds": timer.seconds_so_far, "seconds_with_validation": _now(trainer) - self._started}
        accuracy = float(trainer.callback_metrics["val_acc"])
        self.epochs.append({"epoch": trainer.current_epoch + 1, "accuracy": accuracy, **times})
        if trainer.is_global_zero:
            replace_text(self.path, json.dumps(self.epochs))


def first_reached(epochs: Sequence[dict[str, float]], target: float) -> dict[str, float] | None:
    """The first epoch with at least the target's accuracy; None if there is none."""
    return next((epoch for epoch in epochs if epoch["accuracy"] >= target), None)


def summarise(runs: Sequence[dict[str, Any]], target: float) -> dict[str, Any]:
    """Mean and standard deviation over the seeds: of both times, if all reached the target, and of the last accuracy.

    Args:
        runs: Each with its `seed` and `epochs`, see `AccuracyClock`.
    """
    reached = [first_reached(run["epochs"], target) for run in runs]
    summary: dict[str, Any] = {"num_seeds": len(runs), "num_reached": sum(epoch is not None for epoch in reached)}
    if all(reached):
        for clock in CLOCKS:
            summary[clock] = _mean_and_spread([epoch[clock] for epoch in reached if epoch is not None])
    return {**summary, "last_accuracy": _mean_and_spread([run["epochs"][-1]["accuracy"] for run in runs])}


def to_line(summary: dict[str, Any], target: float) -> str:
    """The summary as one sentence."""
    num_seeds, num_reached = summary["num_seeds"], summary["num_reached"]
    end = "accuracy at the end {mean:.4f} +- {spread:.4f}".format(**summary["last_accuracy"])
    if num_reached < num_seeds:
        return f"test accuracy {target}: reached by {num_reached} of {num_seeds} seeds; {end}"
    times = [
        f"{summary[clock]['mean']:.1f} +- {summary[clock]['spread']:.1f} s ({text})" for clock, text in CLOCKS.items()
    ]
    return f"test accuracy {target}: {', '.join(times)} over {num_seeds} seeds; {end}"


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this measurement, and those of `fit`.

    Raises:
        UsageError: For a target that is no fraction, a seed given twice, and for options that it sets itself.
    """
    parser = ToolParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", type=float, required=True, help="test accuracy, a fraction")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--run_dir", help="must be new")
    args, of_fit = parser.parse_known_args(arguments)
    if not 0 < args.target <= 1:
        raise UsageError(f"--target={args.target}: choose a fraction, 0.915 say")
    if twice := [seed for i, seed in enumerate(args.seeds) if seed in args.seeds[:i]]:
        raise UsageError(f"--seeds: {twice[0]} is given twice; name every seed once")
    for name in ("--data.val_size", "--seed_everything"):
        if any(arg.partition("=")[0] == name for arg in of_fit):
            raise UsageError(f"{name}: time_to_accuracy sets it itself; --seeds names the seeds")
    return args, of_fit


def main(arguments: Sequence[str]) -> None:
    """Entry point of `benchmark time_to_accuracy`; ends with the status of a `fit` that fails."""
    args, of_fit = parse(arguments)
    run_dir = new_directory(args.run_dir, "time_to_accuracy")
    command = shlex.join([*PROG.split(), *redact_arguments(arguments)])
    runs: list[dict[str, Any]] = []
    try:
        for seed in args.seeds:
            runs.append({"seed": seed, "epochs": _train(of_fit, seed, run_dir / f"seed_{seed}")})
    except KeyboardInterrupt:
        print("interrupted: the report has the seeds that are done", flush=True)
        sys.exit(130)
    finally:  # what is done counts, also if the next seed fails or is interrupted
        if runs:
            _report(runs, args.target, run_dir, command)


def _report(runs: Sequence[dict[str, Any]], target: float, run_dir: Path, command: str) -> None:
    config = yaml.safe_load((run_dir / f"seed_{runs[0]['seed']}" / "config.yaml").read_text())
    summary = summarise(runs, target)
    report = {"command": command, "machine": machine(config["malloc"]), "target": target, **summary, "runs": runs}
    replace_text(run_dir / "time_to_accuracy.json", json.dumps(report, indent=1))
    print(f"{to_line(summary, target)}\nreport: {run_dir / 'time_to_accuracy.json'}")


def _train(of_fit: Sequence[str], seed: int, run_dir: Path) -> list[dict[str, float]]:
    """The epochs of one run of `fit`, in a process of its own."""
    path = run_dir.parent / f"seed_{seed}.json"
    command = [sys.executable, "-m", "lightning_mgpu", "fit", "--no-wandb", *of_fit]
    command += ["--data.val_size=0", f"--seed_everything={seed}", f"--run_dir={run_dir}"]
    command += [f"--trainer.callbacks+={__name__}.AccuracyClock", f"--trainer.callbacks.path={path}"]
    if status := run_in_group(command):
        if not any(run_dir.parent.iterdir()):
            run_dir.parent.rmdir()
        sys.exit(status)
    if not path.exists() or not run_dir.exists():
        settings = "limit_val_batches, check_val_every_n_epoch and fast_dev_run"
        raise UsageError(f"no epoch was validated, or the run left nothing behind: leave {settings} as they are")
    epochs: list[dict[str, float]] = json.loads(path.read_text())
    return epochs


def _now(trainer: Trainer) -> float:
    synchronize(own_devices(trainer))
    return time.perf_counter()


def _mean_and_spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and sample standard deviation, 0 of a single value."""
    return {"mean": statistics.mean(values), "spread": statistics.stdev(values) if len(values) > 1 else 0.0}
