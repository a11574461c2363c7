"""What `exchange.py` has measured: rows, as text and as a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

LIMIT_COLORS = {"copy": "grey", "read-modify-write": "black"}  # of what memory can do: dashed


def result(name: str, k: int, num_bytes: int, times: Sequence[float]) -> dict[str, Any]:
    """A row: the median of `times` with its spread in seconds, and what it makes in bytes/s."""
    median = statistics.median(times)
    return {
        "algorithm": name,
        "k": k,
        "bytes": num_bytes,
        "seconds": median,
        "min": min(times),
        "max": max(times),
        "runs": len(times),
        "algorithm_bandwidth": num_bytes / median,
        "bus_bandwidth": 2 * (k - 1) / k * num_bytes / median,
    }


def size_text(num_bytes: int) -> str:
    for unit, size in (("MB", 2**20), ("kB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text: an algorithm a line, and how it compares with the textbook and with the read-modify-write."""
    measured = {(r["algorithm"], r["k"], r["bytes"]): r for r in rows if "seconds" in r}
    lines = [f"{'':>10}  {'k':>2}  {'algorithm':<18} {'ms':>10} {'min':>10} {'runs':>6} {'GB/s':>7} {'bus GB/s':>8}  "]
    lines[0] += f"{'x textbook':>10} {'x limit':>8}"
    for row in rows:
        name, k, num_bytes = row["algorithm"], row["k"], row["bytes"]
        line = f"{size_text(num_bytes):>10}  {k:>2}  {name:<18} "
        if "seconds" not in row:
            lines.append(line + f"not measured: {row['skipped']}")
            continue
        line += f"{row['seconds'] * 1e3:>10.3f} {row['min'] * 1e3:>10.3f} {row['runs']:>6} "
        line += f"{row['algorithm_bandwidth'] / 1e9:>7.2f} {row['bus_bandwidth'] / 1e9:>8.2f}  "
        for other, width in (("textbook", 10), ("read-modify-write", 8)):
            reference = measured.get((other, k, num_bytes))
            line += f"{reference['seconds'] / row['seconds']:>{width}.2f} " if reference else " " * (width + 1)
        lines.append(line.rstrip())
    return "\n".join(lines)


def plot_exchange(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw bandwidth against size, both logarithmic, a panel for each k, a line for each algorithm."""
    measured = [row for row in rows if "seconds" in row]
    ks = sorted({row["k"] for row in measured})
    figure = Figure(figsize=(4.5 * max(len(ks), 1), 4), layout="constrained")
    panels = figure.subplots(1, max(len(ks), 1), sharey=True, squeeze=False)[0]
    for k, panel in zip(ks, panels):
        for name in dict.fromkeys(row["algorithm"] for row in measured):
            points = sorted(
                (r["bytes"], r["algorithm_bandwidth"]) for r in measured if (r["algorithm"], r["k"]) == (name, k)
            )
            if points:
                style = {"linestyle": "--", "color": LIMIT_COLORS[name]} if name in LIMIT_COLORS else {}
                panel.plot(*zip(*points), marker=".", label=name, **style)
        panel.set(title=f"k = {k}", xlabel="bytes a device", xscale="log", yscale="log")
        panel.grid(True, alpha=0.3)
    panels[0].set_ylabel("bytes / second")
    if measured:
        panels[-1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
