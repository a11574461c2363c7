"""Put strategies through the conformance suite.

    python -m lightning_mgpu.testing --strategy=manual_allreduce --devices 2 3
    python -m lightning_mgpu.testing --table docs/strategies.md  # all; rewrites the table

The exit status is 1 if a promise is broken that the strategy does not break by its nature.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mgpu.commands import run_command
from lightning_mgpu.errors import UsageError
from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.testing.cases import PROMISES
from lightning_mgpu.testing.check import PromiseResult, check_strategy
from lightning_mgpu.testing.probe import StrategySpec

ALGORITHMS = [f"manual_allreduce{name}" for name in ("", "_tree", "_sharded", "_ring")]
STRATEGIES = ["auto", "ddp", "dp", *ALGORITHMS]
BEGIN, END = "<!-- promises: begin -->", "<!-- promises: end -->"  # around the table


def to_markdown(results: Mapping[tuple[str, str], PromiseResult]) -> str:
    """A table with a row for every promise, and a note for every promise that was not kept."""
    strategies = list(dict.fromkeys(strategy for strategy, _ in results))
    notes: list[str] = []
    lines = ["| promise | " + " | ".join(f"`{name}`" for name in strategies) + " |"]
    lines.append("| --- |" + " :-: |" * len(strategies))
    for name, promise in PROMISES.items():
        cells = []
        for result in (results[strategy, name] for strategy in strategies):
            note = result.reason or result.wrong
            if not result.is_kept and note not in notes:
                notes.append(note)
            cells.append("yes" if result.is_kept else f"no ({notes.index(note) + 1})")
        lines.append(f"| {promise.statement} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"({i}) {note[0].upper()}{note[1:]}.  " for i, note in enumerate(notes, 1)]
    return "\n".join(lines)


def check_strategies(
    strategy: Sequence[str] = STRATEGIES,
    devices: Sequence[int] = (2, 3),
    accelerator: str = "cpu",
    table: Path | None = None,
) -> int:
    """Check strategies, print whether they keep each promise, and return the exit status.

    Args:
        strategy: Names, or dotted paths of a Strategy or of a function that returns one.
        devices: Numbers of devices.
        accelerator: cpu, gpu, or another one that Lightning knows.
        table: A Markdown file with the two lines that mark the table's place.
    """
    _refuse_mistakes(strategy, max(devices), accelerator, table)
    results: dict[tuple[str, str], PromiseResult] = {}
    for name in strategy:
        for k in [1] if name == "auto" else devices:
            print(f"{name} on {k} {accelerator} device{'s' * (k > 1)}", flush=True)
            for result in check_strategy(name, k, accelerator):
                mark = "kept  " if result.is_kept else "cannot" if result.reason else "BROKEN"
                why = "" if result.is_kept else f": {result.reason or result.wrong}"
                print(f"  {mark}  {result.promise.statement}{why}", flush=True)
                if not result.is_kept or (name, result.name) not in results:
                    results[name, result.name] = result
    if table:
        before, _, rest = table.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        table.write_text(f"{before}{BEGIN}\n{to_markdown(results)}\n{END}{after}")
    return 0 if all(result.is_kept or result.reason for result in results.values()) else 1


def _refuse_mistakes(
    strategies: Sequence[str], num_devices: int, accelerator: str, table: Path | None
) -> None:
    """Raise a UsageError now, because the cases take minutes."""
    try:
        for name in strategies:
            make_strategy(name)
        StrategySpec(devices=num_devices, accelerator=accelerator).trainer()
        text = table.read_text() if table else BEGIN + END
    except (ValueError, OSError, MisconfigurationException) as error:
        raise UsageError(str(error)) from error
    if not 0 <= text.find(BEGIN) < text.find(END):
        raise UsageError(f"{table} has no lines {BEGIN} and {END}")


def main() -> int:
    """Entry point of `python -m lightning_mgpu.testing`; returns the exit status."""
    try:
        return run_command(
            check_strategies, sys.argv[1:], "python -m lightning_mgpu.testing", __doc__
        )
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
