"""What a sweep has found so far: `sweep.md` and `sweep.csv`, the best trial first, and the picture `sweep.png`."""

import csv
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import optuna
from optuna.trial import TrialState

from lightning_mgpu.runs.files import replace_text, replacing


def write_report(study: optuna.Study, sweep_dir: Path, metric: str, options: list[str]) -> str:
    """Write the three files; returns the text of `sweep.md`."""
    sign = -1 if study.direction.name == "MAXIMIZE" else 1
    trials = [trial for trial in study.get_trials() if trial.state.is_finished()]
    trials.sort(key=lambda trial: (trial.state != TrialState.COMPLETE, sign * (trial.value or 0)))
    rows: list[list[Any]] = [["trial", *options, metric, "seconds", "note"]]
    for trial in trials:
        values = ["null" if (value := trial.params.get(option)) is None else value for option in options]
        seconds = round(trial.duration.total_seconds(), 1) if trial.duration else ""
        rows.append([trial.number, *values, trial.value, seconds, trial.user_attrs.get("note")])
    with replacing(sweep_dir / "sweep.csv") as part, part.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    lines = [" | ".join(map(_cell, row)) for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    replace_text(sweep_dir / "sweep.md", text := "".join(f"| {line} |\n" for line in lines))
    if options and any(trial.state == TrialState.COMPLETE for trial in trials):
        with replacing(sweep_dir / "sweep.png") as part, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental functions, of axes with one value
            plt.switch_backend("agg")
            optuna.visualization.matplotlib.plot_slice(study, options, target_name=metric)
            plt.savefig(part, dpi=110, format="png", bbox_inches="tight")
            plt.close()
    return text


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
    return text.replace("|", "\\|")
