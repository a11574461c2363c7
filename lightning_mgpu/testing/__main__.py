"""Check what strategies promise, and print a table for a Markdown page.

python -m lightning_mgpu.testing ddp dp manual_allreduce
python -m lightning_mgpu.testing my_package.MyStrategy --devices 3 --options replicas=6

A promise is kept (yes), broken (no), or the run is refused in one line, so that nothing trains
wrongly; the reasons are printed as they are found. The exit status is 1 if a promise is broken.
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import yaml

from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.testing.cases import PROMISES, Run, answer
from lightning_mgpu.testing.check import check_strategy


def main() -> int:
    """Print the table; returns the exit status."""
    prog = "python -m lightning_mgpu.testing"
    parser = ArgumentParser(prog, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="+", help="names, or dotted paths of your own")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--options", nargs="+", default=[], help="of the strategies: name=value")
    args = parser.parse_args()
    options = {name: yaml.safe_load(v) for name, _, v in (o.partition("=") for o in args.options)}
    try:
        for strategy in args.strategies:
            make_strategy(strategy, **options)
    except Exception as error:  # of the user's class, too
        parser.error(str(error))
    rows = {name: list[str]() for name in PROMISES}
    for each in args.strategies:
        for name, word, note in check_strategy(each, args.devices, args.accelerator, **options):
            print(f"{each}, {name}: {word} {note}".rstrip(), file=sys.stderr, flush=True)
            rows[name].append(word)
    print("| promise |", " | ".join(f"`{name}`" for name in args.strategies), "|")
    print("| --- |", " | ".join(":-:" for _ in args.strategies), "|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")
    return int(any("no" in cells for cells in rows.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:  # in all processes of a strategy
        answer(sys.argv[2], Run(*json.loads(sys.argv[3])))
    sys.exit(main())
