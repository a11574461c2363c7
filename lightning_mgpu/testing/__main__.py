"""Put strategies through the conformance suite.

    python -m lightning_mgpu.testing --strategy=manual_allreduce --devices 2 3
    python -m lightning_mgpu.testing --strategy=my_package.MyStrategy --devices 2 --promises parameters uneven
    python -m lightning_mgpu.testing --table docs/strategies.md  # all of them; writes the table anew

The exit status is 1 if a promise is broken that the strategy does not break by its nature.
"""

import argparse
import sys
from pathlib import Path

from lightning_mgpu.runs.processes import exit_on_sigterm
from lightning_mgpu.testing.cases import Kind
from lightning_mgpu.testing.check import check_strategy
from lightning_mgpu.testing.promises import PROMISES, reason
from lightning_mgpu.testing.table import STRATEGIES, around_table, replace_table


def main() -> int:
    exit_on_sigterm()
    parser = argparse.ArgumentParser(
        prog="python -m lightning_mgpu.testing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--strategy", nargs="+", default=[], help="a name, or the dotted path of a Strategy or a factory"
    )
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--promises", nargs="+", default=list(PROMISES), choices=list(PROMISES), metavar="PROMISE")
    parser.add_argument("--timeout", type=float, default=120, help="seconds before a case counts as hanging")
    parser.add_argument("--table", type=Path, help="a Markdown file with the lines that mark the table's place")
    args = parser.parse_args()
    if args.table:  # now, for it takes minutes to fill
        if args.strategy or args.promises != list(PROMISES):
            parser.error(
                "--table writes all columns and rows anew: leave --strategy and --promises out; "
                "a new strategy gets its column by its name in STRATEGIES, in testing/table.py"
            )
        try:
            around_table(args.table)
        except ValueError as error:
            parser.error(f"--table: {error}")
    strategies = args.strategy or STRATEGIES
    outcomes: dict[tuple[str, str], str] = {}
    is_good = True
    for strategy in strategies:
        try:
            Kind(strategy).make_strategy()
        except ValueError as error:
            parser.error(str(error))
        for devices in [1] if strategy == "auto" else args.devices:
            print(f"{strategy} on {devices} {args.accelerator} device{'s' * (devices > 1)}", flush=True)
            for result in check_strategy(strategy, devices, args.accelerator, args.promises, args.timeout):
                why = reason(strategy, result.name) if devices > 1 else ""
                is_good &= result.is_kept or bool(why)
                mark = "kept  " if result.is_kept else "cannot" if why else "BROKEN"
                details = "; ".join(filter(None, (why, result.wrong))) if result.wrong else ""
                print(f"  {mark}  {result.promise.statement}{f': {details}' * bool(details)}", flush=True)
                if result.wrong or (strategy, result.name) not in outcomes:
                    outcomes[strategy, result.name] = result.wrong
    if args.table:
        replace_table(args.table, strategies, outcomes)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
