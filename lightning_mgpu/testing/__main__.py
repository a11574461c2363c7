"""Put strategies through the conformance suite.

    python -m lightning_mgpu.testing --strategy=manual_allreduce --devices 2 3
    python -m lightning_mgpu.testing --table docs/strategies.md  # all; writes the table anew

The exit status is 1 if a promise is broken that the strategy does not break by its nature.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mgpu.testing.cases import PROMISES
from lightning_mgpu.testing.check import Result, check_strategy
from lightning_mgpu.testing.probe import Kind

STRATEGIES = [
    "auto",
    "ddp",
    "dp",
    *(f"manual_allreduce{name}" for name in ("", "_tree", "_sharded", "_ring")),
]
BEGIN, END = "<!-- promises: begin -->", "<!-- promises: end -->"  # around the table


def to_markdown(results: Mapping[tuple[str, str], Result]) -> str:
    """A table with a row for every promise, and a note for every one that was not kept."""
    strategies = list(dict.fromkeys(strategy for strategy, _ in results))
    notes: list[str] = []
    lines = ["| promise | " + " | ".join(f"`{name}`" for name in strategies) + " |"]
    lines.append("| --- |" + " :-: |" * len(strategies))
    for name, promise in PROMISES.items():
        cells = []
        for result in (results[strategy, name] for strategy in strategies):
            why = result.reason or result.wrong
            if not result.is_kept and why not in notes:
                notes.append(why)
            cells.append("yes" if result.is_kept else f"no ({notes.index(why) + 1})")
        lines.append(f"| {promise.statement} | " + " | ".join(cells) + " |")
    return "\n".join(
        [*lines, "", *(f"({i}) {note[0].upper()}{note[1:]}.  " for i, note in enumerate(notes, 1))]
    )


def parse() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m lightning_mgpu.testing", description=__doc__, formatter_class=formatter
    )
    named = "a name, or the dotted path of a Strategy or of a function that returns one"
    parser.add_argument("--strategy", nargs="+", default=STRATEGIES, help=named)
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument(
        "--table", type=Path, help="a Markdown file with the lines that mark the table's place"
    )
    args = parser.parse_args()
    try:  # now, for it takes minutes
        for strategy in args.strategy:
            Kind(strategy).make_strategy()
        Kind(
            devices=max(args.devices), accelerator=args.accelerator
        ).trainer()  # are there as many?
        if args.table and not 0 <= (text := args.table.read_text()).find(BEGIN) < text.find(END):
            parser.error(f"{args.table} has no lines {BEGIN} and {END}")
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))
    return args


def main() -> int:
    args = parse()
    results: dict[tuple[str, str], Result] = {}
    for strategy in args.strategy:
        for devices in [1] if strategy == "auto" else args.devices:
            print(
                f"{strategy} on {devices} {args.accelerator} device{'s' * (devices > 1)}",
                flush=True,
            )
            for result in check_strategy(strategy, devices, args.accelerator):
                mark = "kept  " if result.is_kept else "cannot" if result.reason else "BROKEN"
                why = "" if result.is_kept else f": {result.reason or result.wrong}"
                print(f"  {mark}  {result.promise.statement}{why}", flush=True)
                if not result.is_kept or (strategy, result.name) not in results:
                    results[strategy, result.name] = result
    if args.table:
        before, _, rest = args.table.read_text().partition(BEGIN)
        args.table.write_text(
            f"{before}{BEGIN}\n{to_markdown(results)}\n{END}{rest.partition(END)[2]}"
        )
    return 0 if all(result.is_kept or result.reason for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
