"""What does an allreduce send, and how long would that take?

    python -m lightning_mgpu allreduce my_allreduce.chain_allreduce --devices 4
    python -m lightning_mgpu allreduce textbook ring top_k --devices 8 --link nvlink --sweep

An allreduce runs once, without numbers; an exchange 64 times on a normal matrix per device, the
same in each step: by error feedback, the error of the sum comes near 0. Times are computed: a round
lasts as long as its largest message, no two pairs share a link, and sums take no time.
"""

import pydoc
from inspect import isgeneratorfunction
from typing import Any

import torch

from lightning_mgpu.allreduce import check_allreduce, find_allreduce
from lightning_mgpu.drawing.picture import draw, draw_times
from lightning_mgpu.drawing.trace import NUM_STEPS, Trace, trace
from lightning_mgpu.tools import make_parser

LINKS = {  # seconds per message (NVLink's are PCIe's), bytes per second: d2l.ai, 'Hardware'
    "nvlink": (5e-6, 100e9),
    "pcie3": (5e-6, 16e9),
    "100gbe": (10e-6, 10e9),
    "10gbe": (10e-6, 1e9),
}


def find(name: str) -> Any:
    """A function by its short name or its path. The exchanges can be deleted."""
    found = pydoc.locate(f"lightning_mgpu.exchanges.{name}")
    return found if callable(found) else find_allreduce(name)


def allreduce_command(arguments: list[str]) -> None:
    parser = make_parser("allreduce", __doc__)
    add = parser.add_argument
    add("names", nargs="+", help="textbook, ring, top_k, ..., or the path of a function")
    add("--devices", type=int, metavar="N", default=4)
    add("--mb", type=float, default=160, help="of each device's tensor (default: 160, the book's)")
    add("--link", choices=LINKS, default="pcie3", help="as in the book's 'Hardware'")
    add("--sweep", action="store_true", help="draw times: 2 to 64 devices, and 1 KB to 7 GB")
    add("--picture", default="allreduce.png")
    args = parser.parse_args(arguments)
    functions = {name: find(name) for name in args.names}
    if args.sweep and any(map(isgeneratorfunction, functions.values())):
        parser.error("--sweep: not for an exchange, which runs on matrices of one size")
    link = LINKS[args.link]

    def run(name: str, k: int = args.devices, mb: float = args.mb) -> Trace:
        return trace(functions[name], k, max(1, round(mb * 1e6 / 4)))

    for name, function in functions.items():
        if isgeneratorfunction(function):
            print(f"{name}: an exchange, on at most 256 x 256 numbers")
            find("check_exchange")(function)
        else:
            for k in sorted(checked := {2, 3, 4, args.devices}):
                check_allreduce(function, [torch.device("cpu")] * k)
            print(f"{name}: right for k = {', '.join(map(str, sorted(checked)))}")
    print(f"{1e6 * link[0]:g} us per message, {link[1] / 1e9:g} GB/s ({args.link})")
    traces = {name: run(name) for name in functions}
    for name, each in traces.items():
        n, ms, least = each.nbytes, each.milliseconds(*link), 2 * (each.k - 1) / each.k
        print(f"{name}: {len(each.messages)} messages in {each.num_rounds} rounds, {ms:.4g} ms")
        print(f"  n = {n / 1e6:g} MB; a device sends at most {max(each.sent) / n:.4g} n")
        print(f"  it gets at most {max(each.received) / n:.4g} n; an allreduce needs {least:.4g} n")
        if each.errors:
            share, (first, *_, last) = max(each.sent) / n / max(each.k - 1, 1), each.errors
            print(f"  it sends {share:.3%} of its tensor to each other device")
            print(f"  off the exact sum by {first:.2%}, and over {NUM_STEPS} steps by {last:.2%}")
    figure = draw(traces)
    if args.sweep:
        sizes, ks = (0.001, 0.064, 0.5, 45, 160, 7000), (2, 4, 8, 16, 32, 64)
        by_mb = {f: {mb: run(f, mb=mb).milliseconds(*link) for mb in sizes} for f in functions}
        by_k = {f: {k: run(f, k).milliseconds(*link) for k in ks} for f in functions}
        figure = draw_times({f"devices, {args.mb:g} MB": by_k, f"MB, k = {args.devices}": by_mb})
    figure.savefig(args.picture, dpi=110)
    print(f"picture: {args.picture}")
