"""Pictures of plans: messages by superstep, and predicted times."""

from typing import Any

from matplotlib.figure import Figure

from lightning_mgpu.allreduce.plan import Plan


def draw(plans: dict[str, Plan]) -> Figure:
    """A panel per plan: a line per device, an arrow per message, as thick as its bytes."""
    num_supersteps = max(plan.num_supersteps for plan in plans.values())
    heights = [plan.k + 2 for plan in plans.values()]
    size = (min(4 + 0.4 * num_supersteps, 12), 0.6 + 0.25 * sum(heights))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(plans), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    messages = [message for plan in plans.values() for message in plan.messages]
    largest = max((message.like.nbytes for message in messages), default=1)
    for axes, (name, plan) in zip(panels, plans.items()):
        title = f"{name}: {len(plan.messages)} messages, {plan.num_supersteps} supersteps"
        axes.set_title(title, fontsize=10, loc="left")
        devices = range(plan.k)
        for i, tick in enumerate(axes.set_yticks(devices, [f"device {i}" for i in devices])):
            tick.label1.set_color(f"C{i}")
        axes.set_ylim(plan.k - 0.5, -0.5)  # device 0 above the others
        axes.grid(axis="y")
        for number in range(1, plan.num_supersteps, 2):
            axes.axvspan(number + 0.5, number + 1.5, color="0.94", zorder=0)
        for message in plan.messages:
            look = {
                "arrowstyle": "-|>",
                "color": f"C{message.source}",
                "linewidth": max(0.4, 3 * message.like.nbytes / largest),
            }
            middle = message.superstep + 1
            begin, end = (middle - 0.35, message.source), (middle + 0.35, message.target)
            axes.annotate("", end, begin, arrowprops=look)
    panels[-1].set(xlabel="superstep (color: the sender)", xlim=(0.5, max(num_supersteps, 1) + 0.5))
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
                fillstyle="none",  # equal lines stay visible
                markersize=9,
                label=name,
            )
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="ms, predicted")
        axes.set_xticks([*ms], [f"{x:g}" for x in ms])
        axes.minorticks_off()
        axes.grid(alpha=0.4)
        axes.legend(fontsize=8)
    return figure
