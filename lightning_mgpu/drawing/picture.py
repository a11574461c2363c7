"""Pictures of traces: messages over rounds, and computed times."""

from typing import Any

from matplotlib.figure import Figure

from lightning_mgpu.drawing.trace import Trace


def draw(traces: dict[str, Trace]) -> Figure:
    """A panel per trace: a line per device, an arrow per message, as thick as its bytes."""
    num_rounds = max(trace.num_rounds for trace in traces.values())
    heights = [trace.k + 2 for trace in traces.values()]
    size = (min(4 + 0.4 * num_rounds, 12), 0.6 + 0.25 * sum(heights))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(traces), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    largest = max((m.nbytes for trace in traces.values() for m in trace.messages), default=1)
    for axes, (name, trace) in zip(panels, traces.items()):
        title = f"{name}: {len(trace.messages)} messages, {trace.num_rounds} rounds"
        axes.set_title(title, fontsize=10, loc="left")
        uses_host = trace.sent[trace.k] + trace.received[trace.k] > 0
        names = [f"device {i}" for i in range(trace.k)] + ["host"] * uses_host
        for i, tick in enumerate(axes.set_yticks(range(len(names)), names)):
            tick.label1.set_color(f"C{i}")
        axes.set_ylim(len(names) - 0.5, -0.5)  # device 0 above the others
        axes.grid(axis="y")
        for source, target, nbytes, number in trace.messages:
            look = {
                "arrowstyle": "-|>",
                "color": f"C{source}",
                "linewidth": 3 * nbytes / largest,
            }
            begin, end = (number - 0.35, source), (number + 0.35, target)
            axes.annotate("", end, begin, arrowprops=look)
    panels[-1].set(xlabel="round (colour: the sender)", xlim=(0.4, num_rounds + 0.6))
    panels[-1].locator_params("x", integer=True)
    return figure


def draw_times(panels: dict[str, dict[str, dict[Any, float]]]) -> Figure:
    """A panel per x label, with a line per function: milliseconds by x."""
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    for axes, (label, times) in zip(figure.subplots(1, len(panels)), panels.items()):
        for n, (name, ms) in enumerate(times.items()):
            axes.plot(
                [*ms],
                [*ms.values()],
                "os^vDP*X"[n % 8] + "-",
                fillstyle="none",  # to be seen where lines are equal
                markersize=9,
                label=name,
            )
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="ms, computed")
        axes.set_xticks([*ms], [f"{x:g}" for x in ms])
        axes.minorticks_off()
        axes.grid(alpha=0.4)
        axes.legend(fontsize=8)
    return figure
