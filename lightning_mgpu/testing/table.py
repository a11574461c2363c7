"""The table strategy x promise, from what the suite has seen."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_mgpu.testing.promises import PROMISES, reason

STRATEGIES = [
    *("auto", "ddp", "dp", "manual_allreduce"),
    *("manual_allreduce_tree", "manual_allreduce_sharded", "manual_allreduce_ring"),
]
BEGIN, END = "<!-- promises: begin -->", "<!-- promises: end -->"


def to_markdown(strategies: Sequence[str], outcomes: Mapping[tuple[str, str], str]) -> str:
    """A table with a row for every promise that was tried, and a note for every one that was not kept.

    Args:
        outcomes: By strategy and promise, what was wrong; nothing if it was kept.
    """
    notes: list[str] = []
    lines = ["| promise | " + " | ".join(f"`{name}`" for name in strategies) + " |"]
    lines.append("| --- |" + " :-: |" * len(strategies))
    for name, promise in PROMISES.items():
        if not any((strategy, name) in outcomes for strategy in strategies):
            continue
        cells = []
        for strategy in strategies:
            wrong = outcomes.get((strategy, name))
            if not wrong:
                cells.append("" if wrong is None else "yes")
                continue
            note = reason(strategy, name) or wrong
            if note not in notes:
                notes.append(note)
            cells.append(f"no ({notes.index(note) + 1})")
        lines.append(f"| {promise.statement} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"({i}) {note[0].upper()}{note[1:]}.  " for i, note in enumerate(notes, start=1))])


def around_table(path: Path) -> tuple[str, str]:
    """What a file has before and after the table, the two marks included.

    Raises:
        ValueError: If the file or the marks are not there.
    """
    try:
        before, begin, rest = path.read_text().partition(BEGIN)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}")
    return before + begin, end + after


def replace_table(path: Path, strategies: Sequence[str], outcomes: Mapping[tuple[str, str], str]) -> None:
    """Put the table between the two marks in a file."""
    before, after = around_table(path)
    path.write_text(f"{before}\n{to_markdown(strategies, outcomes)}\n{after}")
