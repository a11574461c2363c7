"""What a sweep has found: `sweep.md`, `sweep.csv` and `sweep.png`, a picture of the metric against every parameter."""

import csv
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_mgpu.runs.files import replace_text, replacing
from lightning_mgpu.sweep.plan import Parameter, Plan, as_argument

Result = dict[str, Any]
"""Of a trial: its number `trial`, its `values`, `seconds`, `error` (in one line, or None) and `metrics` (lowest and
highest by name)."""
LOG_RANGE = 50  # times the smallest value: listed values this far apart are shown on a log axis


def metric_of(plan: Plan, result: Result) -> float | None:
    """The best value of the sweep's metric over a trial's epochs; none for a trial that failed."""
    extremes = result["metrics"].get(plan.metric)
    return None if result["error"] or not extremes else float(extremes[plan.maximize])


def ranked(plan: Plan, results: list[Result]) -> list[Result]:
    """The best trial first, failed ones last."""

    def key(result: Result) -> tuple[bool, float]:
        metric = metric_of(plan, result)
        return metric is None, (-metric if plan.maximize else metric) if metric is not None else result["trial"]

    return sorted(results, key=key)


def write_report(plan: Plan, results: list[Result], sweep_dir: Path, command: str) -> str:
    """Write the three files; returns the text of `sweep.md`."""
    varied = [parameter for parameter in plan.parameters if parameter.num_choices != 1]
    names = [parameter.name for parameter in varied]
    head = ["trial", *names, plan.metric, "seconds", "note"]
    rows = [
        [r["trial"], *(_given(r, name) for name in names), metric_of(plan, r), round(r["seconds"], 1), r["error"]]
        for r in ranked(plan, results)
    ]
    with replacing(sweep_dir / "sweep.csv") as part, part.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    text = _markdown(plan, results, head, rows, command)
    replace_text(sweep_dir / "sweep.md", text)
    if varied:
        with replacing(sweep_dir / "sweep.png") as part:
            _plot(plan, varied, results).savefig(part, dpi=110, format="png")
    return text


def _markdown(plan: Plan, results: list[Result], head: list[str], rows: list[list[Any]], command: str) -> str:
    best = f"{'highest' if plan.maximize else 'lowest'} over the epochs of a trial"
    failed = sum(metric_of(plan, result) is None for result in results)
    summary = f"{len(results)} of {plan.num_trials} trials" + (f", {failed} failed" if failed else "")
    constants = [f"{p.name}={as_argument(p.choice(0))}" for p in plan.parameters if p.num_choices == 1]
    lines = [f"{plan.name}: {summary}, by `{command}`. {plan.metric}: the {best}.", ""]
    lines += [f"In all trials: {', '.join(constants)}.", ""] if constants else []
    lines += [f"| {' | '.join(head)} |", "| ---: |" + " --- |" * len(head[1:-3]) + " ---: | ---: | --- |"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _given(result: Result, name: str) -> Any:
    """The value of a parameter; an empty cell would not tell of null."""
    value = result["values"][name]
    return "null" if value is None else value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "\\|")


def _plot(plan: Plan, varied: list[Parameter], results: list[Result]) -> Figure:
    columns = min(len(varied), 3)
    rows = -(-len(varied) // columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 0.8 + 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for parameter, axes in zip(varied, grid.flat):
        _scatter(axes, plan, parameter, results)
    for axes in grid.flat[len(varied) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel(f"{plan.metric} ({'highest' if plan.maximize else 'lowest'} of a trial)")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(f"{plan.name}: {len(results)} trials", fontsize=11)
    return figure


def _scatter(axes: Axes, plan: Plan, parameter: Parameter, results: list[Result]) -> None:
    """The trials as dots, the best as a star, the failed at the foot."""
    best_first = ranked(plan, results)
    found = [r for r in best_first if metric_of(plan, r) is not None]
    failed = [r for r in best_first if metric_of(plan, r) is None]
    values = [result["values"][parameter.name] for result in best_first]
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    ticks = list(dict.fromkeys(map(as_argument, parameter.options.get("values", values))))

    def x(chosen: list[Result]) -> list[float]:
        own = [result["values"][parameter.name] for result in chosen]
        return own if numeric else [ticks.index(as_argument(value)) for value in own]

    if not numeric:
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlim(-0.5, len(ticks) - 0.5)
    elif parameter.is_log or (min(values) > 0 and max(values) >= LOG_RANGE * min(values)):
        axes.set_xscale("log")
    metrics = [metric for r in found if (metric := metric_of(plan, r)) is not None]
    axes.plot(x(found), metrics, "o", color="#4c72b0", label="trial")
    axes.plot(x(found[:1]), metrics[:1], "*", color="#dd8452", markersize=15, label="best")
    if failed:  # no metric: at the foot of the axes, whatever its scale
        feet = axes.get_xaxis_transform()
        axes.plot(x(failed), [0.02] * len(failed), "x", color="#c44e52", transform=feet, clip_on=False, label="failed")
    axes.set_xlabel(parameter.name)
    axes.grid(alpha=0.3)
