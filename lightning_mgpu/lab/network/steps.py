"""The measured steps of all machines: rows, a table, and a timeline."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.figure import Figure

from lightning_mgpu.lab.network.clock import WARM_UP

COLUMNS = ("machine", "batch", "ms", "ms_computed", "ms_waited", "mb")
# in drawing order: nested spans stay visible
KINDS = ("forward", "backward", "update", "sums", "waiting", "message")


class Steps:
    """Reads the lines that StepClocks have written to a file.

    `rows` contains COLUMNS, then the seconds of the main thread with and without a core, and the
    steps between synchronizations. Times are divided by `speedup`. The first step of an epoch, or
    after an evaluation, has no times.
    """

    def __init__(self, file: IO[bytes], speedup: float = 1.0) -> None:
        file.seek(0)
        lines = defaultdict(list)
        for line in file:
            kind, _, rest = line.decode().rstrip("\n").partition(" ")
            lines[kind].append(rest)
        self.run = Path(lines["run"][0]) if lines["run"] else None
        self.speedup, scale = speedup, 1e3 / speedup
        spans = map(str.split, lines["span"])  # machine, kind, begin, end
        self.spans = [(int(i), kind, scale * float(a), scale * float(b)) for i, kind, a, b in spans]
        rows = np.array([text.split() for text in lines["step"]], float).reshape(-1, 9)
        self.rows = rows[rows[:, 0].argsort(kind="stable")] * (1, 1, *[scale] * 3, 1e-6, 1, 1, 1)

    def print_table(self, mbit: Sequence[float]) -> None:
        """Print means per machine, over whole synchronization periods; `mbit` is per machine."""
        print("| machine | MB sent | MB per step | link busy | ms per step | median | waited |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        shares = []
        for i, rate in enumerate(mbit):
            rows = self.rows[self.rows[:, 0] == i]
            steps = rows[np.isfinite(rows[:, 2])]
            every = int(rows[:, 8].max(initial=1))
            num = max(0, len(steps) - WARM_UP) // every * every
            total = f"{rows[:, 5].sum():.2f}"
            if num == 0:
                print(f"| {i} | {total} | not measured: too few steps after the first {WARM_UP} |")
                continue
            measured = steps[WARM_UP:][:num]
            ms, _, waited, mb = measured[:, 2:6].mean(0)
            cells = f"{total} | {mb:.4f} | {800e3 * mb / ms / rate:.0f} % | {ms:.1f}"
            end = f"{np.median(measured[:, 2]):.1f} | {waited:.1f} |".replace("nan", "")
            print(f"| {i} | {cells} | {end}")
            used, without = steps[:, 6:8].sum(0)  # seconds that the main thread had a core, or not
            if used < 0.9 * (used + without):
                shares.append(f"machine {i} had {used / (used + without):.2f}")
        if self.speedup != 1:
            print(f"Times in this table are divided by {self.speedup:g}; all others are measured.")
        if shares:
            fix = "use fewer machines or threads, or end other programs"
            print(f"CPU cores are scarce ({', '.join(shares)} of one): {fix}.")

    def write_csv(self, path: str) -> None:
        """Write a row per machine and step; unknown values are empty."""
        rows = self.rows[:, : len(COLUMNS)].tolist()
        lines = [",".join(f"{value:.6g}" for value in row) for row in rows]
        text = "\n".join([",".join(COLUMNS), *lines, ""])
        Path(path).write_text(text.replace("nan", ""))

    def draw(self) -> Figure:
        """Draw a row per machine: its spans as bars, and above them the messages in flight."""
        start = min(begin for *_, begin, _ in self.spans)
        machines = sorted({i for i, *_ in self.spans})
        figure = Figure(figsize=(9, 1.1 + len(machines)), layout="constrained")
        axes = figure.add_subplot(xlabel=f"ms (F = {self.speedup:g}); white: the rest")
        for number, kind in enumerate(KINDS):
            axes.plot([], color=f"C{number}", linewidth=6, label=kind)  # for the legend
            for machine in machines:
                lane, last = 0, 0.0
                own = [span[2:] for span in self.spans if span[:2] == (machine, kind)]
                for begin, end in sorted(own):
                    lane = lane + 1 if begin < last else 0  # overlapping messages
                    last = max(end, last)
                    above = machine - 0.28 - 0.03 * (lane % 12), 0.02
                    place = above if kind == "message" else (machine - 0.25, 0.6)
                    bar = begin - start, end - begin
                    look: Any = {"facecolor": f"C{number}", "edgecolor": "white", "linewidth": 0.8}
                    axes.broken_barh([bar], place, **look)  # a line between supersteps
        axes.set_yticks(machines, [f"machine {i}" for i in machines])
        axes.set_ylim(len(machines) - 0.5, -0.65)  # machine 0 above the others
        axes.grid(axis="x", alpha=0.4)
        figure.legend(loc="outside upper center", ncols=len(KINDS), fontsize=9)
        return figure
