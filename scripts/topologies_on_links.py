"""Predict and measure steps with each allreduce, run as written, on emulated links.

    python scripts/topologies_on_links.py --links 2,50,4 20,500,4 --images 32 --speedup 2

A link is: one-way latency in ms, Mbit/s, and the number of machines. `predicted` is the time of the
messages, summed over buckets and supersteps: the latency, plus the largest number of bytes that a
machine sends or receives divided by the bandwidth. `measured` is the time of a step minus a step
of one machine alone. Other options are passed to every `fit`.
"""

import re
from tempfile import TemporaryDirectory
from typing import Any

import torch
from exchanges_on_links import FEW_STEPS, make_parser, network_line, run_network

from lightning_mgpu import allreduce, models
from lightning_mgpu.allreduce.record import record
from lightning_mgpu.distributed.comm.as_written import WrittenBucket
from lightning_mgpu.distributed.comm.buckets import Bucket, group_parameters
from lightning_mgpu.lab.network.clock import WARM_UP
from lightning_mgpu.strategies.manual_allreduce import BUCKET_CAP_MB

STRATEGY = "--trainer.strategy=manual_allreduce"
WRITTEN = f"{STRATEGY} --trainer.strategy.as_written=true --trainer.strategy.allreduce="
NAMES = ("textbook", "tree", "ring", "sharded", "halving_doubling")
ROWS = {"ddp": "--trainer.strategy=ddp", "gathered": STRATEGY}
ROWS |= {name: f"{WRITTEN}lightning_mgpu.allreduce.{name}_allreduce" for name in NAMES}
NUM_STEPS = f"--trainer.limit_train_batches={WARM_UP + 17}"


def predict(name: str, module: Any, k: int, ms: float, mbit: float) -> tuple[float, list[float]]:
    """Predict the milliseconds of all messages of a step, and the MB sent by each machine."""
    function = getattr(allreduce, f"{name}_allreduce")
    is_elementwise = getattr(function, "elementwise", False)
    total, sent = 0.0, torch.zeros(k, dtype=torch.float64)
    for group in group_parameters([*module.parameters()], 1e6 * BUCKET_CAP_MB):
        bucket = Bucket(group, k, is_elementwise)
        written = [WrittenBucket(bucket, lambda X: record(function, k, X), i) for i in range(k)]
        for number in range(len(written[0].sizes)):
            sizes = [part.sizes[number] for part in written]  # sent and received, by machine
            bytes_by_machine = torch.tensor(
                [[sum(map(sum, side)) for side in both] for both in sizes], dtype=torch.float64
            )
            sent += bytes_by_machine[:, 0]
            total += ms + bytes_by_machine.max().item() * 8e-3 / mbit
    return total, (sent / 1e6).tolist()


def measure(row: str, link: str, args: Any, options: list[str]) -> tuple[float, list[float]]:
    """Measure the mean milliseconds per step, and the MB per step sent by each machine."""
    with TemporaryDirectory() as run:
        given = (*FEW_STEPS, NUM_STEPS, *options, f"--run_dir={run}")
        output = run_network(network_line(row, link, given, args.images, args.speedup))
    rows = [line.split("|") for line in re.findall(r"^\| \d.*", output, flags=re.MULTILINE)]
    return sum(float(cells[5]) for cells in rows) / len(rows), [float(cells[3]) for cells in rows]


def show(values: list[float]) -> str:
    """Format values; one number if they are nearly equal."""
    if max(values) < 1.05 * min(values):
        values = values[:1]
    return ", ".join(f"{value:.2f}" for value in values)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="LeNet", help="class in lightning_mgpu.models")
    args, options = parser.parse_known_args()
    module, options = getattr(models, args.model)(), [*options, f"--model={args.model}"]
    for link in args.links:
        ms, mbit, machines = map(float, link.split(","))
        alone, _ = measure("alone", link, args, options)
        print(f"\n{link}: one machine alone takes {alone:.0f} ms per step\n")
        print("| | ms predicted | ms measured | step, ms | MB sent, predicted | MB measured |")
        print("| --- | ---: | ---: | ---: | --- | --- |", flush=True)
        for name, row in ROWS.items():
            step, megabytes = measure(f"{name}={row}", link, args, options)
            found = f"{step - alone:.0f} | {step:.0f}"
            as_sharded = "sharded" if name == "gathered" else name  # a slice per machine
            planned = ("", "")
            if name != "ddp":
                total, sent = predict(as_sharded, module, int(machines), ms, mbit)
                planned = (f"{total:.0f}", show(sent))
            print(f"| {name} | {planned[0]} | {found} | {planned[1]} | {show(megabytes)} |")
