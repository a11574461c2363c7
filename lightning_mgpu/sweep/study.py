"""What Optuna knows of a sweep: a journal in its directory, and `sweep.md`, `sweep.csv` and `sweep.png`."""

import csv
import warnings
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import optuna
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from lightning_mgpu.runs.files import replace_text, replacing
from lightning_mgpu.sweep.trial import JOURNAL

TRIAL_DIR = "trial_"  # and its number, in three digits


def open_study(sweep_dir: Path, direction: Literal["minimize", "maximize"] | None = None) -> optuna.Study:
    """The study of a sweep, which several processes may have open; with a direction, a new one where there is none."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = JournalStorage(JournalFileBackend(str(sweep_dir / JOURNAL)))
    if direction is None:
        return optuna.load_study(study_name="sweep", storage=storage)
    return optuna.create_study(study_name="sweep", storage=storage, direction=direction, load_if_exists=True)


def open_trial(run_dir: Path) -> tuple[optuna.Trial, str]:
    """The trial of a run, by the run's directory, and the name of the metric."""
    study = open_study(run_dir.parent)
    settings = study.user_attrs["settings"]
    if options := settings["early_terminate"]:
        # W&B's Hyperband compares a run at epochs min_iter * eta^k with those before it: successive halving
        eta = options.get("eta", 3)
        first = options.get("min_iter") or options.get("max_iter", 1) // eta ** options.get("s", 0)
        study.pruner = SuccessiveHalvingPruner(min_resource=max(1, first), reduction_factor=eta)
    else:
        study.pruner = NopPruner()
    number = int(run_dir.name.removeprefix(TRIAL_DIR))
    return optuna.trial.Trial(study, study.get_trials()[number]._trial_id), settings["metric"]


def write_report(study: optuna.Study, sweep_dir: Path, metric: str, options: list[str]) -> str:
    """Write the three files, the best trial first; returns the text of `sweep.md`."""
    sign = -1 if study.direction.name == "MAXIMIZE" else 1
    trials = [trial for trial in study.get_trials() if trial.state.is_finished()]
    trials.sort(key=lambda trial: (trial.state != TrialState.COMPLETE, sign * (trial.value or 0)))
    head = ["trial", *options, metric, "seconds", "note"]
    rows = [_row(trial, options) for trial in trials]
    with replacing(sweep_dir / "sweep.csv") as part, part.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    lines = [" | ".join(map(_cell, row)) for row in (head, ["---"] * len(head), *rows)]
    replace_text(sweep_dir / "sweep.md", text := "".join(f"| {line} |\n" for line in lines))
    if options and any(trial.state == TrialState.COMPLETE for trial in trials):
        with replacing(sweep_dir / "sweep.png") as part, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental functions, of axes with one value
            plt.switch_backend("agg")
            optuna.visualization.matplotlib.plot_slice(study, options, target_name=metric)
            plt.savefig(part, dpi=110, format="png", bbox_inches="tight")
            plt.close()
    return text


def _row(trial: FrozenTrial, options: list[str]) -> list[Any]:
    values = ["null" if (value := trial.params.get(option)) is None else value for option in options]
    seconds = round(trial.duration.total_seconds(), 1) if trial.duration else ""
    return [trial.number, *values, trial.value, seconds, trial.user_attrs.get("note")]


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
    return text.replace("|", "\\|")
