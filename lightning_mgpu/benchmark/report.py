"""From measurements to Markdown tables: medians over rounds, and ratios taken within a round."""

import statistics
from collections.abc import Sequence
from typing import Any

from lightning_mgpu.benchmark.exchange import COSTS
from lightning_mgpu.benchmark.rounds import Measurement

STEPS = ["", "samples/s", "ms per step (lowest to highest)", "/ by hand", "/ one device", "/ `ddp`"]
STEPS += ["processes x threads"]


def headline(report: dict[str, Any]) -> str:
    machine = report["machine"]
    hardware = ", ".join(machine["gpus"]) or f"{machine['cores']} cores of {machine['cpu']}"
    measured = (
        f"Measured {machine['date']} on {hardware}, torch {machine['torch']}, lightning "
        f"{machine['lightning']}; medians of {report['repeats']} rounds, by `{report['command']}`."
    )
    if machine["load"] > machine["cores"] + 1:  # one is this program's, which waits
        measured += f" The load was {machine['load']:.1f}: other programs disturbed the figures."
    return measured


def step_tables(results: Sequence[Measurement]) -> list[str]:
    """A table for every model. A ratio says how many times as fast a row is."""
    lines = []
    for model in dict.fromkeys(result["model"] for result in results):
        of_model = [result for result in results if result["model"] == model]
        title = f"{model}, global batch of {of_model[0]['batch_size']}"
        lines += markdown(title, STEPS, [step_row(result, of_model) for result in of_model])
    return lines + not_measured(results)


def step_row(result: Measurement, results: Sequence[Measurement]) -> list[str]:
    if not (seconds := result["seconds"]):
        return [result["title"], *[""] * (len(STEPS) - 1)]

    def ratio_to(engine: str, **alike: Any) -> str:
        wanted = {"engine": engine, **alike}.items()
        return ratio(result, next((each for each in results if wanted <= each.items()), None))

    alike = {name: result[name] for name in ("devices", "replicas")}
    step, low, high = (1e3 * f(seconds) for f in (statistics.median, min, max))
    return [
        result["title"],
        f"{1e3 * result['batch_size'] / step:,.0f}",
        f"{step:.1f} ({low:.1f} to {high:.1f})",
        ratio_to("book", **alike) or ratio_to("loop"),
        ratio_to("auto"),
        ratio_to("ddp", **alike),
        f"{result['processes']} x {result['threads']}",
    ]


def exchange_tables(results: Sequence[Measurement]) -> list[str]:
    """A table for every number of tensors: milliseconds, and speed beside the textbook's."""
    ks, sizes, names = (
        list(dict.fromkeys(result[key] for result in results)) for key in ("k", "size", "title")
    )
    by_case = {(result["k"], result["size"], result["title"]): result for result in results}
    head = ["", "the busiest sends", *(f"{size:g} MB: ms (speed / textbook)" for size in sizes)]
    lines = []
    for k in ks:
        rows = [[name, f"{COSTS[name](k):.3g} x MB" if name in COSTS else ""] for name in names]
        for row in rows:
            for size in sizes:
                result, textbook = by_case[k, size, row[0]], by_case.get((k, size, "textbook"))
                seconds = result["seconds"]
                times = f"{1e3 * statistics.median(seconds):.3g}" if seconds else ""
                row.append(f"{times} ({ratio(result, textbook)})")
        lines += markdown(f"The allreduce alone: {k} tensors in one process", head, rows)
    return lines + not_measured(results)


def ratio(result: Measurement, other: Measurement | None) -> str:
    """How many times as fast as another one: the median of the rounds that both have."""
    pairs = zip(result["seconds"], other["seconds"]) if other else ()
    ratios = [of_other / seconds for seconds, of_other in pairs]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return ["", f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))]


def not_measured(results: Sequence[Measurement]) -> list[str]:
    failed = {f"{each['title']}: {each['error']}": None for each in results if each["error"]}
    return [f"\nNot measured: {line}" for line in failed]
