"""What a sweep has found so far: `sweep.md` and `sweep.csv`, the best trial first, and the picture `sweep.png`."""

import csv
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from optuna.distributions import CategoricalDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from lightning_mgpu.files import replace_text, replacing
from lightning_mgpu.sweep.plan import Plan


def write_report(plan: Plan, study: Study, sweep_dir: Path, command: str) -> str:
    """Write the three files; returns the text of `sweep.md`."""
    best_first = sorted(
        (trial for trial in study.get_trials() if trial.state.is_finished()), key=lambda t: _rank(plan, t)
    )
    head = ["trial", *plan.space, plan.metric, "seconds", "note"]
    rows = [_row(plan, trial) for trial in best_first]
    with replacing(sweep_dir / "sweep.csv") as part, part.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    summary = f"{plan.name}: {len(rows)} of {plan.num_trials} trials, by `{command}`."
    lines = [f"{summary} {plan.metric}: the best of a trial's epochs.", "", f"| {' | '.join(head)} |"]
    lines += [f"|{' --- |' * len(head)}", *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]
    replace_text(sweep_dir / "sweep.md", text := "\n".join(lines) + "\n")
    found = [trial for trial in best_first if trial.state == TrialState.COMPLETE]
    if plan.space and found:
        with replacing(sweep_dir / "sweep.png") as part:
            _draw(plan, found).savefig(part, dpi=110, format="png")
    return text


def _rank(plan: Plan, trial: FrozenTrial) -> tuple[bool, float]:
    """Completed trials first, the best before the others."""
    if trial.state != TrialState.COMPLETE or trial.value is None:
        return True, trial.number
    return False, -trial.value if plan.direction == "maximize" else trial.value


def _row(plan: Plan, trial: FrozenTrial) -> list[Any]:
    given = ["null" if (value := trial.params.get(name)) is None else value for name in plan.space]
    seconds = trial.duration.total_seconds() if trial.duration else math.nan
    best = max if plan.direction == "maximize" else min
    is_pruned = trial.state == TrialState.PRUNED
    value = best(trial.intermediate_values.values()) if is_pruned else trial.value
    note = "stopped early" if is_pruned else trial.user_attrs.get("error", "")
    return [trial.number, *given, "" if value is None else value, round(seconds, 1), note]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _draw(plan: Plan, best_first: list[FrozenTrial]) -> Figure:
    """The metric against every parameter, the best trial as a star."""
    figure = Figure(figsize=(1 + 4 * len(plan.space), 3.6), layout="constrained")
    panels = figure.subplots(1, len(plan.space), squeeze=False, sharey=True)[0]
    values = [trial.value for trial in best_first]
    for (name, distribution), axes in zip(plan.space.items(), panels):
        xs = [trial.params[name] for trial in best_first]
        if isinstance(distribution, CategoricalDistribution):
            axes.plot(list(map(str, distribution.choices)), [math.nan] * len(distribution.choices))  # their order
            xs = list(map(str, xs))
        elif getattr(distribution, "log", False):
            axes.set_xscale("log")
        axes.plot(xs, values, "o", color="#4c72b0")
        axes.plot(xs[:1], values[:1], "*", color="#dd8452", markersize=15)
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"{plan.metric} (best of a trial)")
    return figure
