"""Plot of the placement report: reuse and time to first token of each policy."""

from typing import TYPE_CHECKING, Any

from blockyard.deploy.figures.plot_style import BLACK, GREY, POLICIES, legend, panels, plain_log

from bench.placement.simulation.study import STANDARD_LOADS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPREAD = 0.7
"""Vertical spread of a load's dots, in rows."""


def draw(figures: dict[str, Any]) -> "Figure":
    cells = figures["cells"]
    labels = [load.label for load in STANDARD_LOADS if f"{load.label} | prefix" in cells]
    figure, (reuse, ttft) = panels(1, 2, height=0.8 + 0.62 * len(labels), sharey=True)
    for number, (policy, look) in enumerate(POLICIES.items()):
        heights = [height + SPREAD * (number / (len(POLICIES) - 1) - 0.5) for height in range(len(labels))]
        for axes, quantity, factor in ((reuse, "reuse", 1), (ttft, "ttft_mean", 1000)):
            values = [factor * cells[f"{label} | {policy}"][quantity]["mean"] for label in labels]
            axes.plot(values, heights, **look.settings(5), linestyle="none", label=policy, clip_on=False)
    ideals = [cells[f"{label} | prefix"]["ideal_reuse"]["mean"] for label in labels]
    heights = [float(height) for height in range(len(labels))]
    tops, bottoms = [height - 0.45 for height in heights], [height + 0.45 for height in heights]
    reuse.vlines(ideals, tops, bottoms, colors=BLACK, linestyles="dotted", label="ideal")
    reuse.set_yticks(heights, labels)
    reuse.set(ylim=(len(labels) - 0.5, -0.5), xlim=(-0.03, 1.03))
    reuse.set(ylabel="workload, requests/s, workers", xlabel="reuse, share of prompt tokens (0 to 1)")
    ttft.set(xscale="log", xlabel="mean time to first token, ms")
    plain_log(ttft.xaxis)
    for axes in (reuse, ttft):
        axes.grid(visible=False, axis="y")
        for height in heights[1:]:
            axes.axhline(height - 0.5, color=GREY, linewidth=0.4)
    legend(figure, reuse)
    return figure
