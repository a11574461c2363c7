"""The steps of machines: as rows, as a table, and some of them as a picture."""

import csv
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_mgpu.network.clock import WARM_UP

COLUMNS = ("machine", "batch", "ms", "ms_computed", "ms_waited", "mb")
COLORS = {  # bars are drawn in this order, so that one within another can be seen
    "the rest": "lightgray",
    "forward": "C0",
    "backward": "C1",
    "update": "C2",
    "sums": "C4",
    "waiting": "lightcoral",
    "message": "black",
}


class Steps:
    """What the StepClocks have written to a file.

    `rows` has the columns of COLUMNS, then the seconds of the main thread with a core and without
    one, and `every`. Times of machines that are `faster` are divided by it. The first step of an
    epoch, or after an evaluation, has none.
    """

    def __init__(self, file: IO[bytes], faster: float = 1.0) -> None:
        file.seek(0)
        lines = defaultdict(list)
        for line in file:
            kind, _, rest = line.decode().rstrip("\n").partition(" ")
            lines[kind].append(rest)
        self.run = Path(lines["run"][0]) if lines["run"] else None
        self.spans = [each.split() for each in lines["span"]]
        self.faster, scale = faster, 1e3 / faster
        rows = np.array([each.split() for each in lines["step"]], float).reshape(-1, 9)
        self.rows = rows[rows[:, 0].argsort(kind="stable")] * (1, 1, *[scale] * 3, 1e-6, 1, 1, 1)

    def summarize(self, machine: int) -> tuple[float, ...]:
        """MB sent in all; MB, ms, median and waited ms per step, over whole windows of `every`.

        And the share of a core that the main thread had of those that it needed.
        """
        rows = self.rows[self.rows[:, 0] == machine]
        steps = rows[np.isfinite(rows[:, 2])]
        every = int(rows[-1, 8]) if len(rows) else 1
        measured = steps[WARM_UP:]
        measured = measured[: len(measured) // every * every]
        used, without = steps[:, 6:8].sum(0)
        share = used / (used + without) if used else np.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # means of no steps
            ms, _, waited, mb = measured[:, 2:6].mean(0)
            return rows[:, 5].sum(), mb, ms, float(np.median(measured[:, 2])), waited, share

    def print_table(self, mbit: Sequence[float]) -> None:
        """Print a row per machine, whose links have these rates."""
        found = [self.summarize(i) for i in range(len(mbit))]
        print("| machine | MB sent | MB per step | link busy | ms per step | median | waited |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for i, (total, mb, ms, *times, _) in enumerate(found):
            busy = 800e3 * mb / ms / mbit[i]
            median, waited = (f"{each:.1f}" if each == each else "" for each in times)
            cells = f"{total:.2f} | {mb:.4f} | {busy:.0f} % | {ms:.1f} | {median} | {waited}"
            print(f"| {i} | {cells} |")
        if self.faster != 1:
            told = f"Times in this table are divided by {self.faster:g}; all others are"
            print(f"{told} measured here.")
        shares = [f"machine {i} had {had:.2f}" for i, (*_, had) in enumerate(found) if had < 0.9]
        if shares:
            advice = "take fewer machines or OMP_NUM_THREADS, or end other programs"
            told = f"{', '.join(shares)} of one; {advice}"
            print(f"Cores are short, so do not trust the times: {told}.")

    def write_csv(self, path: str) -> None:
        """A row per machine and step; a cell of which nothing is known is empty."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for machine, batch, *others in self.rows[:, : len(COLUMNS)].tolist():
                cells = ["" if each != each else f"{each:.6g}" for each in others]
                writer.writerow([int(machine), int(batch), *cells])

    def draw(self) -> Figure:
        """A row per machine: bars of what it does, and above them the messages under way."""
        start = min(float(begin) for *_, begin, _ in self.spans)
        bars = defaultdict[tuple[str, int], list[tuple[float, float]]](list)  # begin and length
        for number, kind, *times in self.spans:
            begin, end = ((float(each) - start) * 1e3 / self.faster for each in times)
            bars[kind, int(number)].append((begin, end - begin))
        machines = sorted({machine for _, machine in bars})
        for machine in machines:
            own = [bar for (_, i), of_kind in bars.items() if i == machine for bar in of_kind]
            begin = min(own)[0]
            bars["the rest", machine] = [(begin, max(map(sum, own)) - begin)]
        figure = Figure(figsize=(9, 1.1 + len(machines)), layout="constrained")
        scale = f", divided by {self.faster:g}" if self.faster != 1 else ""
        axes = figure.add_subplot(xlabel=f"ms{scale}")
        for kind, color in COLORS.items():
            for machine in machines:
                places = sorted(bars[kind, machine])
                for bar, lane in zip(places, lanes(places)):
                    above = machine - 0.28 - 0.03 * (lane % 12), 0.02
                    y = above if kind == "message" else (machine - 0.25, 0.6)
                    axes.broken_barh([bar], y, color=color)
        axes.set_yticks(machines, [f"machine {i}" for i in machines])
        axes.set_ylim(len(machines) - 0.5, -0.65)  # machine 0 above the others
        axes.grid(axis="x", alpha=0.4)
        there = {kind for (kind, _), of_kind in bars.items() if of_kind}
        handles = [Patch(color=c, label=kind) for kind, c in COLORS.items() if kind in there]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(COLORS), fontsize=9)
        return figure


def lanes(bars: Iterable[tuple[float, float]]) -> list[int]:
    """For each bar, in the order of their begins, the first lane that is free then."""
    ends: list[float] = []
    found = []
    for begin, width in bars:
        free = (i for i, end in enumerate(ends) if end <= begin)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [begin + width]
        found.append(lane)
    return found
