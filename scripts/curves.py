"""Plot the curves of several runs in curves.png, as in the README and docs/runs.md.

python scripts/curves.py RUN_DIR RUN_DIR ...
"""

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure

figure = Figure(figsize=(9, 3.3), layout="constrained")
for axes, name in zip(figure.subplots(1, 2), ["val_loss", "val_acc"]):
    axes.set(xlabel="epoch", ylabel=name)
    axes.grid(alpha=0.4)
    for n, run_dir in enumerate(map(Path, sys.argv[1:])):
        rows = csv.DictReader((run_dir / "metrics.csv").open())
        points = [(int(row["epoch"]) + 1, float(row[name])) for row in rows if row[name]]
        # narrow lines on wide ones: equal curves stay visible
        axes.plot(*zip(*points), color=f"C{n}", linewidth=max(1, 6 - 4 * n), label=run_dir.name)
    axes.legend()
figure.savefig("curves.png", dpi=110)
