"""Trace the messages of an allreduce or exchange, and predict its time.

    python -m lightning_mgpu trace my_allreduce.chain_allreduce --devices 4
    python -m lightning_mgpu trace textbook ring top_k --delay_ms 2 --mbit 50

An allreduce is traced on tensors without values. An exchange runs for 64 steps on a random matrix
per device, the same in each step: with error feedback, the error of the sum approaches 0. The
predicted time of a superstep is the latency, plus the largest number of bytes that a device sends
or receives divided by the bandwidth (Valiant's BSP model; LogGP is finer), without computation.
"""

import pydoc
from inspect import isgeneratorfunction
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.allreduce import check_allreduce, counts_to_check, find_allreduce
from lightning_mgpu.allreduce.plan import Plan
from lightning_mgpu.lab.tracing.picture import draw, draw_times
from lightning_mgpu.lab.tracing.trace import NUM_STEPS, predict, trace, trace_exchange
from lightning_mgpu.tools import UsageError, make_parser

SIZES = (0.001, 0.064, 0.516, 8, 160)  # MB
COUNTS = (2, 4, 8, 16, 32)


def find(name: str) -> Any:
    """A function by its short name or its path."""
    if name.startswith("_"):
        raise UsageError(f"no allreduce {name!r}: use a name without an underscore, or a path")
    found = pydoc.locate(f"lightning_mgpu.exchanges.{name}")
    return found if callable(found) else find_allreduce(name)


def check(name: str, function: Any, k: int) -> None:
    if isgeneratorfunction(function):
        print(f"{name}: an exchange, traced on at most 256 x 256 values")
        find("check_exchange")(function)
    else:
        counts = counts_to_check(function, k)
        for count in counts:
            check_allreduce(function, [torch.device("cpu")] * count, as_written=True)
        print(f"{name}: correct for k = {', '.join(map(str, counts))}")


def report(name: str, plan: Plan, errors: list[float], link: tuple[float, float]) -> None:
    ms, n, k = 1000 * predict(plan, *link), plan.like.nbytes, plan.k
    print(f"{name}: {len(plan.messages)} messages in {plan.num_supersteps} supersteps, {ms:.4g} ms")
    for verb, counts in (("sent", plan.sent), ("received", plan.received)):
        print(f"  MB {verb} per device: {', '.join(f'{count / 1e6:.4g}' for count in counts)}")
    largest, least = max(*plan.sent, *plan.received) / n, 2 * (k - 1) / k
    print(f"  at most {largest:.4g} n, with n = {n / 1e6:.4g} MB; the lower bound is {least:.4g} n")
    if errors:
        print(f"  {max(plan.sent) / n / max(k - 1, 1):.3%} of the tensor to each other device")
        first, last = errors[0], errors[-1]
        print(f"  error of the sum: {first:.2%} in a step, {last:.2%} over {NUM_STEPS} steps")


def trace_command(arguments: list[str]) -> None:
    parser = make_parser("trace", __doc__)
    add = parser.add_argument
    add("names", nargs="+", help="textbook, ring, top_k, ..., or the dotted path of a function")
    add("--devices", type=int, metavar="N", default=4, help="number of devices (default: 4)")
    add("--mb", type=float, default=0.516, help="tensor size in MB (default: 0.516, LeNet)")
    add("--delay_ms", type=float, default=20.0, help="latency of a message (default: 20)")
    add("--mbit", type=float, default=100.0, help="bandwidth per direction, Mbit/s (default: 100)")
    add("--sweep", action="store_true", help="plot times for 2 to 32 devices, and 1 KB to 160 MB")
    add("--picture", default="trace.png", help="picture file (default: trace.png)")
    args = parser.parse_args(arguments)
    if Path(args.picture).suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--picture={args.picture}: use a .png, .pdf or .svg file")
    functions = {name: find(name) for name in args.names}
    if args.sweep and any(map(isgeneratorfunction, functions.values())):
        parser.error("--sweep: not supported for exchanges; omit it")
    link = args.delay_ms / 1000, args.mbit * 1e6 / 8

    def run(name: str, k: int = args.devices, mb: float = args.mb) -> tuple[Plan, list[float]]:
        numel, function = max(1, round(mb * 1e6 / 4)), functions[name]
        is_exchange = isgeneratorfunction(function)
        return (
            trace_exchange(function, k, numel) if is_exchange else (trace(function, k, numel), [])
        )

    def milliseconds(name: str, k: int = args.devices, mb: float = args.mb) -> float:
        return 1000 * predict(run(name, k, mb)[0], *link)

    for name, function in functions.items():
        check(name, function, args.devices)
    print(f"predicted for {args.delay_ms:g} ms and {args.mbit:g} Mbit/s:")
    runs = {name: run(name) for name in functions}
    for name, (plan, errors) in runs.items():
        report(name, plan, errors, link)
    figure = draw({name: plan for name, (plan, _) in runs.items()})
    if args.sweep:
        by_mb = {name: {mb: milliseconds(name, mb=mb) for mb in SIZES} for name in functions}
        by_k = {name: {k: milliseconds(name, k) for k in COUNTS} for name in functions}
        figure = draw_times({f"devices, {args.mb:g} MB": by_k, f"MB, k = {args.devices}": by_mb})
    figure.savefig(args.picture, dpi=110)
    print(f"picture: {args.picture}")
