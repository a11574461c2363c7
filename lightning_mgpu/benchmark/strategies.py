"""Samples a second of every strategy at the same global batch, on real images, through the real Trainer.

    python -m lightning_mgpu.benchmark.strategies
    python -m lightning_mgpu.benchmark.strategies --model ResNet18 --num_steps 6 --repeats 3

Each configuration runs in a process of its own; the runs of one repeat come one after the other, so that a machine that
drifts does not favour one of them, and ratios are taken within a repeat. The median over repeats is printed.

All run with the same allocator. With `--malloc keep`, the default, glibc keeps freed memory instead of giving it back
to the kernel after every step, whose page faults would be a good part of what is measured. Outside of this script, set
the variables of `KEEP` before Python starts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from lightning_mgpu import models
from lightning_mgpu.callbacks.epoch_timer import devices, synchronize
from lightning_mgpu.console import quieten
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.strategies import ManualAllreduceStrategy

RESULT = "result: "
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_TOP_PAD_": str(2**26)}
REFERENCES = ("one device", "ddp")


class StepTimer(Callback):
    """Seconds of the steps after the first `warm_up`, devices synchronised at both ends."""

    def __init__(self, warm_up: int, num_steps: int) -> None:
        self.warm_up, self.num_steps = warm_up, num_steps
        self.start = self.seconds = self.in_allreduce = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self.warm_up:
            synchronize(devices(trainer))
            self.start, self.in_allreduce = time.perf_counter(), 0.0
        elif trainer.global_step == self.warm_up + self.num_steps:
            synchronize(devices(trainer))
            self.seconds = time.perf_counter() - self.start


def measure(name: str, num_devices: int, args: argparse.Namespace) -> None:
    """Train for some steps and print seconds a step, and of these in `allreduce`, as JSON."""
    quieten()
    seed_everything(0, verbose=False)
    timer = StepTimer(args.warm_up, args.num_steps)
    trainer = Trainer(
        accelerator="cpu" if args.cpu else "auto",
        devices=1 if name == "one device" else num_devices,
        strategy="auto" if name == "one device" else name,
        max_steps=args.warm_up + args.num_steps,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    if isinstance(trainer.strategy, ManualAllreduceStrategy):
        allreduce = trainer.strategy.allreduce

        def timed(tensors: list[Tensor]) -> None:
            start = time.perf_counter()
            allreduce(tensors)
            timer.in_allreduce += time.perf_counter() - start

        trainer.strategy.allreduce = timed
    trainer.fit(getattr(models, args.model)(), FashionMNIST(batch_size=args.batch_size, root=args.root))
    if trainer.is_global_zero:
        step = timer.seconds / args.num_steps
        print(RESULT + json.dumps({"step": step, "allreduce": timer.in_allreduce / args.num_steps}), flush=True)


def run(name: str, argv: list[str], malloc: str) -> dict[str, float]:
    """Measure one configuration in a fresh process."""
    command = [sys.executable, "-m", "lightning_mgpu.benchmark.strategies", *argv, "--measure", name]
    env = {**os.environ, **(KEEP if malloc == "keep" else {})}
    output = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=env)
    for line in output.stdout.splitlines():
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))  # type: ignore[no-any-return]
    raise RuntimeError(f"{name} failed:\n{output.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["manual_allreduce"])
    parser.add_argument("--model", default="LeNet", choices=["LeNet", "ResNet18"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=256, help="global")
    parser.add_argument("--num_steps", type=int, default=60)
    parser.add_argument("--warm_up", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", default="data")
    parser.add_argument("--cpu", action="store_true", help="on the CPU also where there are GPUs")
    parser.add_argument("--malloc", choices=["keep", "default"], default="keep")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.devices, args)
        return

    names = [*REFERENCES, *args.strategies]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for repeat in range(args.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:  # another one first every time
            results[name].append(run(name, sys.argv[1:], args.malloc))

    print(f"{args.model}, global batch {args.batch_size}, {args.devices} devices, torch {torch.__version__}, ", end="")
    print(f"{os.cpu_count()} cores, malloc: {args.malloc}, median of {args.repeats} repeats of {args.num_steps} steps")
    print(f"{'strategy':<24}{'samples/s':>10}{'/ one device':>14}{'/ ddp':>8}{'allreduce':>11}")
    for name in names:
        rate = statistics.median(args.batch_size / result["step"] for result in results[name])
        to_one, to_ddp = (
            statistics.median(reference["step"] / own["step"] for reference, own in zip(results[other], results[name]))
            for other in REFERENCES
        )
        share = statistics.median(result["allreduce"] / result["step"] for result in results[name])
        shown = f"{share:>10.1%}" if name in args.strategies else f"{'':>10}"
        print(f"{name:<24}{rate:>10,.0f}{to_one:>14.2f}{to_ddp:>8.2f} {shown}")


if __name__ == "__main__":
    main()
