"""`python -m lightning_mgpu benchmark`: which strategy is fastest here, and what does each part of a step cost?

python -m lightning_mgpu benchmark --quick
python -m lightning_mgpu benchmark --strategies ddp dp manual_allreduce --models LeNet ResNet18 --devices 2
python -m lightning_mgpu benchmark --devices 1 2 4 --scaling weak
python -m lightning_mgpu benchmark --malloc keep
python -m lightning_mgpu benchmark compare runs/A/benchmark.json runs/B/benchmark.json
python -m lightning_mgpu benchmark time_to_accuracy --target 0.915 --config experiment/lenet_fast.yaml
"""

import argparse
import json
import shlex
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import lightning_mgpu.strategies  # noqa: F401 (registers them)
from lightning_mgpu.benchmark import time_to_accuracy
from lightning_mgpu.benchmark.compare import compare, load
from lightning_mgpu.benchmark.directory import new_directory
from lightning_mgpu.benchmark.exchange import (
    ALGORITHMS,
    QUICK_SIZES,
    SIZES,
    measure_exchange,
    measure_gradients,
    model_gradients,
)
from lightning_mgpu.benchmark.exchange_processes import measure_processes
from lightning_mgpu.benchmark.exchange_report import plot_exchange
from lightning_mgpu.benchmark.plan import Configuration, configurations
from lightning_mgpu.benchmark.report import plot, to_markdown
from lightning_mgpu.benchmark.runner import MeasurementError, calibrate, expected_seconds, machine, run_plan
from lightning_mgpu.benchmark.summary import summarise
from lightning_mgpu.benchmark.worker import make_model
from lightning_mgpu.cli.checks import find_strategy
from lightning_mgpu.cli.errors import ToolParser, UsageError, mistakes
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.runs.files import replace_text
from lightning_mgpu.runs.redact import redact_arguments, redact_values
from lightning_mgpu.runs.wandb_run import Tracking, finish, save_file, start_run

PROG = "python -m lightning_mgpu benchmark"


def parser() -> argparse.ArgumentParser:
    result = ToolParser(prog=PROG, description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    strategies = ["ddp", "dp", "manual_allreduce"]
    result.add_argument("--strategies", nargs="*", default=strategies, help="also dotted paths of your own")
    result.add_argument("--models", nargs="+", default=["LeNet", "ResNet18"], help="also dotted paths of your own")
    result.add_argument("--devices", nargs="+", type=int, default=[2])
    result.add_argument("--batch_size", type=int, default=256, help="global, shared by the devices")
    result.add_argument("--scaling", choices=["strong", "weak"], default="strong", help="weak: k times the batch")
    result.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto")
    result.add_argument("--repeats", type=int, default=5)
    result.add_argument("--num_steps", type=int, help="of a stretch; left out: about two seconds")
    result.add_argument(
        "--malloc", choices=["default", "keep"], default="default", help="keep: glibc keeps freed memory"
    )
    result.add_argument("--exchange", action=argparse.BooleanOptionalAction, default=True, help="the allreduce alone")
    result.add_argument(
        "--quick",
        action="store_true",
        help="LeNet, two repeats of ten steps, where nothing else is given, without the book's loop: under two minutes "
        "on two cores",
    )
    result.add_argument("--root", default="data", help="where the images are")
    result.add_argument("--source", default="auto", help="of the images, as --data.source of fit; synthetic will do")
    result.add_argument("--run_dir", help="must be new")
    result.add_argument("--no-wandb", action="store_true")
    return result


def main(arguments: Sequence[str]) -> None:
    """Entry point of `benchmark`, `benchmark compare` and `benchmark time_to_accuracy`.

    Raises:
        UsageError: For arguments that make no sense, before anything is measured.
    """
    if arguments[:1] == ["compare"]:
        if len(arguments) != 3:
            raise UsageError(f"benchmark compare takes two reports: {PROG} compare A.json B.json")
        print("\n".join(compare(*(load(Path(path)) for path in arguments[1:]))))
        return
    if arguments[:1] == ["time_to_accuracy"]:
        time_to_accuracy.main(arguments[1:])
        return
    args = parser().parse_args(arguments)
    if args.quick:  # other defaults; what is given goes before them
        quick = parser()
        quick.set_defaults(models=["LeNet"], repeats=2, num_steps=10)
        args = quick.parse_args(arguments)
    plan = _plan(args)
    FashionMNIST(root=args.root, source=args.source).prepare_data()
    run_dir = new_directory(args.run_dir, "benchmark")
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "lightning_mgpu", "benchmark", *redact_arguments(arguments)]),
        "machine": machine(args.malloc),
        "options": redact_values({name: value for name, value in vars(args).items() if name != "run_dir"}),
        "results": [],
        "exchange": [],
        "gradients": {},
    }
    try:
        _measure(args, plan, report, run_dir)
    except (KeyboardInterrupt, SystemExit) as end:
        print("interrupted: the report has what was measured so far", flush=True)
        _finish(report, run_dir, args)
        sys.exit(130 if isinstance(end, KeyboardInterrupt) else end.code)
    _finish(report, run_dir, args)


def _plan(args: argparse.Namespace) -> list[Configuration]:
    """What to measure.

    Raises:
        UsageError: If a strategy or model does not exist, or a number is out of range.
    """
    args.strategies = [name for name in args.strategies if name != "auto"]  # one device is always measured
    for name in args.strategies:
        find_strategy(name, "--strategies ")
    for name in args.models:
        with mistakes():
            make_model(name)
    for name in ("repeats", "batch_size"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name}={getattr(args, name)}: choose 1 or more")
    if min(args.devices) < 1 or (args.num_steps is not None and args.num_steps < 1):
        raise UsageError("--devices and --num_steps: choose 1 or more")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.accelerator == "auto":
        args.accelerator = "gpu" if num_gpus >= max(args.devices) else "cpu"
    if args.accelerator == "gpu" and num_gpus < max(args.devices):
        raise UsageError(f"--accelerator=gpu --devices {max(args.devices)}: there are {num_gpus} GPUs")
    plan = configurations(args.strategies, args.models, args.devices, args.batch_size, args.accelerator, args.scaling)
    return [each for each in plan if not args.quick or each.engine != "book"]


def _measure(args: argparse.Namespace, plan: list[Configuration], report: dict[str, Any], run_dir: Path) -> None:
    data = {"root": args.root, "source": args.source}
    try:
        times = calibrate(plan, data, args.malloc)
    except MeasurementError as error:
        raise UsageError(str(error)) from error

    def num_steps(configuration: Configuration) -> tuple[int, int]:
        steps = args.num_steps or max(4, min(60, round(2.0 / times[configuration.model][1])))
        return max(2, steps // 5), steps

    seconds = expected_seconds(plan, args.repeats, num_steps, times) + (_exchange_seconds(args) if args.exchange else 0)
    print(
        f"{len(plan)} configurations, {args.repeats} repeats: about {int(seconds) // 60} min {int(seconds) % 60} s; "
        f"Ctrl-C keeps what is done; results go to {run_dir}",
        flush=True,
    )

    def save(results: list[dict[str, Any]]) -> None:
        report["results"] = results
        _write(run_dir, report)

    with _Progress(len(plan) * args.repeats) as progress:
        run_plan(plan, args.repeats, num_steps, data, args.malloc, save, progress.next)
    if args.exchange:
        _measure_exchange(args, report, lambda: _write(run_dir, report))


def _measure_exchange(args: argparse.Namespace, report: dict[str, Any], save: Callable[[], None]) -> None:
    """The allreduce functions alone: over sizes, and with the gradients of the models."""
    ks, sizes, seconds = ([2], QUICK_SIZES, 0.03) if args.quick else ([2, 4, 8], SIZES, 0.5)
    kind = "cuda" if args.accelerator == "gpu" else "cpu"
    devices = [torch.device(kind, i) for i in range(max(args.devices))] if kind == "cuda" else [torch.device("cpu")]

    def progress(what: str) -> None:
        print(f"allreduce alone: {what}", flush=True)

    report["exchange"] = measure_exchange(ALGORITHMS, sizes, ks, seconds, devices=devices, progress=progress)
    report["exchange"] += measure_processes(sizes, ks, seconds, timeout=20 if args.quick else 300, progress=progress)
    save()
    for name in args.models:
        shapes = model_gradients(make_model(name))
        rows = measure_gradients(ALGORITHMS, shapes, ks, seconds, devices=devices, progress=progress)
        report["gradients"][name] = rows
        save()


def _exchange_seconds(args: argparse.Namespace) -> float:
    return 25.0 if args.quick else 240.0  # measured on two cores; the compiled kernels are a part of it


def _finish(report: dict[str, Any], run_dir: Path, args: argparse.Namespace) -> None:
    """Write and show the report, and track it."""
    _write(run_dir, report)
    text = to_markdown(report)
    (run_dir / "benchmark.md").write_text(text)
    pictures = plot(report, run_dir)
    if report["exchange"]:
        pictures.append(run_dir / "exchange.png")
        plot_exchange(report["exchange"], pictures[-1])
    print(text)
    run, where = start_run(
        Tracking(mode="disabled" if args.no_wandb else "auto"), run_dir, "benchmark", report["options"]
    )
    if run is not None:
        import wandb

        run.log({path.stem: wandb.Image(str(path)) for path in pictures})
        run.summary.update({f"{s.key}/samples_per_sec": s.rate for s in map(summarise, report["results"]) if s})
        save_file(run, run_dir / "benchmark.json", "benchmark.json")
        finish(run)
    print(f"report: {run_dir / 'benchmark.md'}, {run_dir / 'benchmark.json'}\nwandb:  {where}")


def _write(run_dir: Path, report: dict[str, Any]) -> None:
    replace_text(run_dir / "benchmark.json", json.dumps(report, indent=1))


class _Progress:
    """A bar with the time that is left on a terminal, a line for every measurement elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, disable=not sys.stdout.isatty())
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> "_Progress":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def next(self, name: str) -> None:
        """Say that the measurement before is done, and the named one begins."""
        self.bar.update(self.task, description=name, completed=self.done)
        self.done += 1
        if self.bar.disable:
            print(f"{self.done}/{self.total} {name}", flush=True)
