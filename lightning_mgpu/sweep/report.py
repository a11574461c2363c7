"""What a sweep has found so far: `sweep.md` and `sweep.csv`, the best trial first, and the picture `sweep.png`."""

import csv
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from optuna.visualization.matplotlib import plot_slice

from lightning_mgpu.runs.files import replace_text, replacing
from lightning_mgpu.sweep.plan import Plan
from lightning_mgpu.sweep.trials import Record, study_of


def write_report(records: dict[int, Record], plan: Plan, sweep_dir: Path) -> str:
    """Write the three files; returns the text of `sweep.md`."""
    sign = -1 if plan.direction == "maximize" else 1
    ended = [(number, record) for number, record in records.items() if "note" in record]
    ended.sort(key=lambda each: (each[1]["value"] is None, sign * (each[1]["value"] or 0)))
    rows: list[list[Any]] = [["trial", *plan.space, plan.metric, "seconds", "note"]]
    for number, record in ended:
        values = ["null" if (value := record["params"][option]) is None else value for option in plan.space]
        rows.append([number, *values, record["value"], record["seconds"], record["note"]])
    with replacing(sweep_dir / "sweep.csv") as part, part.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    lines = [" | ".join(map(_cell, row)) for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    replace_text(sweep_dir / "sweep.md", text := "".join(f"| {line} |\n" for line in lines))
    if plan.space and any(record["value"] is not None for _, record in ended):
        with replacing(sweep_dir / "sweep.png") as part, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental functions, of axes with one value
            plt.switch_backend("agg")
            plot_slice(study_of(records, plan), list(plan.space), target_name=plan.metric)
            plt.savefig(part, dpi=110, format="png", bbox_inches="tight")
            plt.close()
    return text


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
    return text.replace("|", "\\|")
