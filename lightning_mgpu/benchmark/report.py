"""From measurements of steps to a table and a picture: medians, and ratios within a repeat."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_mgpu.benchmark.parts import PARTS
from lightning_mgpu.benchmark.plan import BY_HAND
from lightning_mgpu.benchmark.processes import Result

HEAD = ["", "global batch", "samples/s", "ms a step (lowest to highest)"]
HEAD += ["/ loop", "/ one device", "/ `ddp`", "of it the strategy's own, ms"]


def over_repeats(value: Callable[..., float], *results: Result | None) -> float | None:
    """The median of a value over the repeats that all results have; `None` if there is none."""
    found = [
        value(*each)
        for each in zip(*(r["repeats"] if r else () for r in results))
        if None not in each
    ]
    return statistics.median(found) if found else None


def steps(result: Result) -> list[float]:
    """Seconds of a step, in every repeat."""
    return [repeat["step"] for repeat in result["repeats"] if repeat is not None]


def parts(result: Result) -> dict[str, float]:
    """Seconds of the parts of a step: medians, scaled to add up to the median step."""
    repeats = [repeat["parts"] for repeat in result["repeats"] if repeat is not None]
    own = {part: statistics.median(repeat.get(part, 0.0) for repeat in repeats) for part in PARTS}
    scale = statistics.median(steps(result)) / sum(own.values())
    return {part: seconds * scale for part, seconds in own.items()}


def name_of(configuration: dict[str, Any]) -> str:
    """An engine in words, and on how many devices if on several."""
    engine, devices, replicas = map(configuration.get, ("engine", "devices", "replicas"))
    name = {**BY_HAND, "auto": "one device"}.get(str(engine), engine)
    if replicas:
        return f"{name} ({replicas} replicas on one device)"
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


def tables(results: Sequence[Result]) -> list[str]:
    """A table for every model; cells nobody measured stay empty."""
    lines = []
    for model, own in by_model(results).items():
        lines += markdown(model, HEAD, [_cells(result, own) for result in own])
    return [*lines, *not_measured(results)]


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return ["", f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))]


def not_measured(results: Sequence[Result]) -> list[str]:
    return [f"\nNot measured: {result['error']}." for result in results if result["error"]]


def by_model(results: Sequence[Result]) -> dict[str, list[Result]]:
    models = dict.fromkeys(result["configuration"]["model"] for result in results)
    return {model: [r for r in results if r["configuration"]["model"] == model] for model in models}


def _cells(result: Result, results: Sequence[Result]) -> list[str]:
    own = result["configuration"]
    names = [name_of(own), str(own["batch_size"])]
    if not (seconds := steps(result)):
        return names + [""] * (len(HEAD) - 2)

    def find(engine: str, **wanted: Any) -> Result | None:
        fits = [
            r for r in results if {"engine": engine, **wanted}.items() <= r["configuration"].items()
        ]
        return fits[0] if fits else None

    alike = {name: own[name] for name in ("devices", "replicas") if name in own}
    others = find("loop"), find("auto"), find("ddp", **alike)
    ratios = [
        over_repeats(lambda this, other: other["step"] / this["step"], result, other)
        for other in others
    ]
    strategy = over_repeats(lambda this: this["parts"].get("strategy", 0.0), result)
    step = statistics.median(seconds)
    return [
        *(*names, f"{own['batch_size'] / step:,.0f}"),
        f"{step * 1e3:.1f} ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})",
        *("" if value is None else f"{value:.2f}" for value in ratios),
        f"{strategy * 1e3:.2f}" if strategy else "",
    ]


def draw(results: Sequence[Result], machine: dict[str, Any], directory: Path) -> None:
    """`parts_MODEL.png` for every model measured: a bar a configuration, of the parts of a step."""
    for model, own in by_model([result for result in results if steps(result)]).items():
        figure = Figure(figsize=(9, 1.6 + 0.45 * len(own)), layout="constrained")
        axes = figure.add_subplot()
        names = [
            "{}, batch {batch_size}".format(name_of(r["configuration"]), **r["configuration"])
            for r in own
        ]
        left = [0.0] * len(own)
        for part in PARTS:
            bars = axes.barh(
                names, [parts(result)[part] * 1e3 for result in own], left=left, label=part
            )
            left = [bar.get_x() + bar.get_width() for bar in bars]
        rates = [r["configuration"]["batch_size"] / statistics.median(steps(r)) for r in own]
        axes.bar_label(bars, [f"{rate:,.0f} samples/s" for rate in rates], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="ms a step", xlim=(0, 1.35 * max(left)))
        figure.legend(ncols=len(PARTS), fontsize=8, loc="outside lower center")
        figure.suptitle(f"{model}: where the time of a step goes; {hardware(machine)}", fontsize=9)
        figure.savefig(directory / f"parts_{model.rpartition('.')[2]}.png", dpi=110)
