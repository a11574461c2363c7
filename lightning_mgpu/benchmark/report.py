"""The results as a Markdown table and pictures."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_mgpu.benchmark.parts import PARTS
from lightning_mgpu.benchmark.plan import REFERENCES
from lightning_mgpu.benchmark.summary import Summary, efficiency, ratio, summarise

Report = dict[str, Any]
COLORS = ("#8da0cb", "#66c2a5", "#4c72b0", "#dd8452", "#c44e52", "#8172b3", "#bbbbbb")  # of the parts


def name_of(configuration: dict[str, Any]) -> str:
    """An engine in words: what it is, and on how many devices if on several."""
    engine, devices = configuration["engine"], configuration["devices"]
    return REFERENCES.get(engine, engine) + (f" ({devices} devices)" if devices > 1 else "")


def to_markdown(report: Report) -> str:
    """A table for every model; cells nobody measured stay empty."""
    machine, options = report["machine"], report["options"]
    lines = [
        f"Measured {machine['date']} on {_hardware(machine)}, torch {machine['torch']}, "
        f"lightning {machine['lightning']}; medians of {options['repeats']} repeats, by `{report['command']}`.",
    ]
    for model in dict.fromkeys(result["configuration"]["model"] for result in report["results"]):
        own = [result for result in report["results"] if result["configuration"]["model"] == model]
        lines += ["", f"**{model}**", "", *_table(own)]
        lines += [f"Not measured: {result['error']}." for result in own if result["error"]]
    for model, rows in report.get("gradients", {}).items():
        lines += ["", f"**The allreduce alone, gradients of {model}**", "", *_exchange_table(rows)]
    return "\n".join(lines) + "\n"


def _exchange_table(rows: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of an allreduce of all gradients, and how many times as fast as the textbook's that is."""
    measured = {(row["algorithm"], row["k"]): row["seconds"] for row in rows if "seconds" in row}
    ks = sorted({k for _, k in measured})
    head = ["", *(f"k = {k}, ms | / textbook | / limit" for k in ks)]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: | ---: | ---: |" * len(ks)]
    for name in dict.fromkeys(name for name, _ in measured):
        cells = [name]
        for k in ks:
            own = measured.get((name, k))
            cells.append(f"{own * 1e3:.3f}" if own else "")
            for other in ("textbook", "read-modify-write"):
                reference = measured.get((other, k))
                cells.append(f"{reference / own:.2f}" if own and reference else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table(results: list[dict[str, Any]]) -> list[str]:
    head = ["", "global batch", "samples/s", "ms a step (lowest to highest)", "/ loop", "/ one device", "/ `ddp`"]
    head += ["efficiency", "memory, MB", "threads"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    one = _one_device(results)
    for result in results:
        configuration, summary = result["configuration"], summarise(result)
        cells = [name_of(configuration), f"{configuration['batch_size']}"]
        if summary is None:
            lines.append(f"| {' | '.join(cells + [''] * (len(head) - 2))} |")
            continue
        ratios = [
            _ratio(result, _find(results, "loop", configuration, devices=1)),
            _ratio(result, _find(results, "auto", configuration, devices=1)),
            _ratio(result, _find(results, "ddp", configuration)),
            efficiency(result["repeats"], one["repeats"], configuration["devices"])
            if one and configuration["devices"] > 1
            else None,
        ]
        cells += [
            f"{summary.rate:,.0f}",
            f"{summary.step * 1e3:.1f} ({summary.low * 1e3:.1f} to {summary.high * 1e3:.1f})",
            *("" if value is None else f"{value:.2f}" for value in ratios),
            f"{summary.memory / 2**20:,.0f}",
            f"{summary.threads}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _find(results: list[dict[str, Any]], engine: str, like: dict[str, Any], devices: int | None = None) -> Any:
    """The result of another engine at the same number of devices; of one device, that of the same or smallest batch."""
    wanted = devices or like["devices"]
    found = [r for r in results if r["configuration"]["engine"] == engine and r["configuration"]["devices"] == wanted]
    same = [r for r in found if r["configuration"]["batch_size"] == like["batch_size"]]
    return next(iter(same or found), None)


def _one_device(results: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What scaling is compared with: one device at `--batch_size`, the smallest batch of all, weak scaling's too."""
    alone = [result for result in results if result["configuration"]["engine"] == "auto"]
    return min(alone, key=lambda r: r["configuration"]["batch_size"], default=None)


def _ratio(result: dict[str, Any], other: dict[str, Any] | None) -> float | None:
    return ratio(result["repeats"], other["repeats"]) if other else None


def plot(report: Report, directory: Path) -> list[Path]:
    """Draw where the time of a step goes, for every model, and how it scales, where there are several device counts.

    Returns the paths, `parts_MODEL.png` and `scaling_MODEL.png`.
    """
    paths = []
    for model in dict.fromkeys(result["configuration"]["model"] for result in report["results"]):
        own = [result for result in report["results"] if result["configuration"]["model"] == model]
        summaries = [summary for result in own if (summary := summarise(result))]
        if not summaries:
            continue
        name = model.rpartition(".")[2]
        paths.append(directory / f"parts_{name}.png")
        _plot_parts(model, summaries, report["machine"]).savefig(paths[-1], dpi=110)
        one = summarise(alone) if (alone := _one_device(own)) else None
        if one and len({summary.configuration["devices"] for summary in summaries}) > 2:
            paths.append(directory / f"scaling_{name}.png")
            _plot_scaling(model, summaries, one, report["machine"]).savefig(paths[-1], dpi=110)
    return paths


def _plot_scaling(model: str, summaries: list[Summary], one: Summary, machine: dict[str, Any]) -> Figure:
    """Samples a second against the number of devices; dashed, k times one device."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    engines = dict.fromkeys(s.configuration["engine"] for s in summaries if s.configuration["devices"] > 1)
    counts = sorted({s.configuration["devices"] for s in summaries})
    axes.plot(counts, [k * one.rate for k in counts], "k--", label="k times one device")
    for engine in engines:
        rates = {s.configuration["devices"]: s.rate for s in summaries if s.configuration["engine"] == engine}
        axes.plot([1, *sorted(rates)], [one.rate, *(rates[k] for k in sorted(rates))], "o-", label=engine)
    axes.set(xlabel="devices", ylabel="samples/s", xticks=counts, title=f"{model}: {_hardware(machine)}")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _hardware(machine: dict[str, Any]) -> str:
    return f"{', '.join(machine['gpus']) or '{cores} cores of {cpu}'.format(**machine)}, malloc: {machine['malloc']}"


def _plot_parts(model: str, summaries: list[Summary], machine: dict[str, Any]) -> Figure:
    """Horizontal bars, one a configuration, made of the parts of a step."""
    figure = Figure(figsize=(9, 1.6 + 0.45 * len(summaries)), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{name_of(s.configuration)}, batch {s.configuration['batch_size']}" for s in summaries]
    left = [0.0] * len(summaries)
    for part, color in zip(PARTS, COLORS):
        width = [summary.parts[part] * 1e3 for summary in summaries]
        axes.barh(names, width, left=left, label=part, color=color)
        left = [a + b for a, b in zip(left, width)]
    for i, summary in enumerate(summaries):
        axes.annotate(f" {summary.rate:,.0f} samples/s", (summary.step * 1e3, i), va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(summary.step for summary in summaries) * 1e3)
    axes.set_xlabel("ms a step")
    figure.suptitle(f"{model}: where the time of a step goes", fontsize=11)
    axes.set_title(_hardware(machine), fontsize=9)
    figure.legend(ncols=len(PARTS), fontsize=8, loc="outside lower center")
    return figure
