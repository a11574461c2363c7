"""From measurements of steps to a table and a picture: medians, and ratios within a repeat."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_mgpu.benchmark.parts import PARTS
from lightning_mgpu.benchmark.plan import BY_HAND
from lightning_mgpu.benchmark.processes import Measurement

HEAD = ["", "global batch", "samples/s", "ms per step (lowest to highest)"]
HEAD += ["/ loop", "/ one device", "/ `ddp`", "of it the strategy's own, ms"]


def median_over_repeats(value: Callable[..., float], *results: Measurement | None) -> float | None:
    """The median of a value over the repeats that all results have; None if there are none."""
    repeats = zip(*(result["repeats"] if result else () for result in results))
    values = [value(*each) for each in repeats if None not in each]
    return statistics.median(values) if values else None


def step_seconds(result: Measurement) -> list[float]:
    """Seconds per step, in every repeat."""
    return [repeat["step"] for repeat in result["repeats"] if repeat is not None]


def part_seconds(result: Measurement) -> dict[str, float]:
    """Seconds of the parts of a step: medians, scaled so that they add up to the median step."""
    repeats = [repeat["parts"] for repeat in result["repeats"] if repeat is not None]
    medians = {part: statistics.median(each.get(part, 0.0) for each in repeats) for part in PARTS}
    scale = statistics.median(step_seconds(result)) / sum(medians.values())
    return {part: seconds * scale for part, seconds in medians.items()}


def describe(configuration: dict[str, Any]) -> str:
    """An engine in words, and its number of devices if there are several."""
    engine, devices, replicas = map(configuration.get, ("engine", "devices", "replicas"))
    processes = configuration.get("processes")
    name = {**BY_HAND, "auto": "one device"}.get(str(engine), engine)
    if replicas:
        return f"{name} ({replicas} replicas on one device)"
    if processes:
        return f"{name} ({devices} devices, {processes} processes)"
    return f"{name} ({devices} devices)" if devices != 1 else str(name)


def headline(machine: dict[str, Any], command: str, repeats: int) -> str:
    measured = (
        f"Measured {machine['date']} on {hardware(machine)}, torch {machine['torch']}, "
        f"lightning {machine['lightning']}; medians of {repeats} repeats, by `{command}`."
    )
    if machine["load"] > machine["cores"] + 1:  # one is this program's, which waits
        load = f"(load {machine['load']:.1f})"
        measured += f" Other programs wanted the cores, too {load}: the figures mean little."
    return measured


def hardware(machine: dict[str, Any]) -> str:
    return ", ".join(machine["gpus"]) or f"{machine['cores']} cores of {machine['cpu']}"


def tables(results: Sequence[Measurement]) -> list[str]:
    """A table for every model; cells that were not measured stay empty."""
    lines = []
    for model, of_model in by_model(results).items():
        lines += markdown(model, HEAD, [_cells(result, of_model) for result in of_model])
    return [*lines, *not_measured(results)]


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return ["", f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))]


def not_measured(results: Sequence[Measurement]) -> list[str]:
    return [f"\nNot measured: {result['error']}." for result in results if result["error"]]


def by_model(results: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    models = dict.fromkeys(result["configuration"]["model"] for result in results)
    return {model: [r for r in results if r["configuration"]["model"] == model] for model in models}


def _cells(result: Measurement, results: Sequence[Measurement]) -> list[str]:
    """A row of the table: a result, beside others of the same model."""
    configuration = result["configuration"]
    names = [describe(configuration), str(configuration["batch_size"])]
    if not (seconds := step_seconds(result)):
        return names + [""] * (len(HEAD) - 2)

    def ratio_to(**wanted: Any) -> str:
        """How many times as fast as the first result of such a configuration."""
        fits = [r for r in results if wanted.items() <= r["configuration"].items()]
        ratio = median_over_repeats(
            lambda this, other: other["step"] / this["step"], result, next(iter(fits), None)
        )
        return "" if ratio is None else f"{ratio:.2f}"

    alike = {key: configuration[key] for key in ("devices", "replicas") if key in configuration}
    step = statistics.median(seconds)
    strategy = median_over_repeats(lambda this: this["parts"].get("strategy", 0.0), result)
    return [
        *names,
        f"{configuration['batch_size'] / step:,.0f}",
        f"{step * 1e3:.1f} ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})",
        *(ratio_to(engine="loop"), ratio_to(engine="auto"), ratio_to(engine="ddp", **alike)),
        f"{strategy * 1e3:.2f}" if strategy else "",
    ]


def plot_parts(results: Sequence[Measurement], machine: dict[str, Any], directory: Path) -> None:
    """`parts_MODEL.png` for every model: one bar per configuration, of the parts of a step."""
    measured = [result for result in results if step_seconds(result)]
    for model, of_model in by_model(measured).items():
        figure = Figure(figsize=(9, 1.6 + 0.45 * len(of_model)), layout="constrained")
        axes = figure.add_subplot()
        configurations = [result["configuration"] for result in of_model]
        names = [f"{describe(each)}, batch {each['batch_size']}" for each in configurations]
        left = [0.0] * len(of_model)
        for part in PARTS:
            widths = [part_seconds(result)[part] * 1e3 for result in of_model]
            bars = axes.barh(names, widths, left=left, label=part)
            left = [bar.get_x() + bar.get_width() for bar in bars]
        medians = [statistics.median(step_seconds(result)) for result in of_model]
        rates = [each["batch_size"] / step for each, step in zip(configurations, medians)]
        axes.bar_label(bars, [f"{rate:,.0f} samples/s" for rate in rates], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="ms per step", xlim=(0, 1.35 * max(left)))
        figure.legend(ncols=len(PARTS), fontsize=8, loc="outside lower center")
        figure.suptitle(f"{model}: where the time of a step goes; {hardware(machine)}", fontsize=9)
        figure.savefig(directory / f"parts_{model.rpartition('.')[2]}.png", dpi=110)
