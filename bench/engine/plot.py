"""Plot of the engine benchmark: output tokens/s and time to first token of each system, by workload."""

from typing import TYPE_CHECKING, Any

from blockyard.deploy.figures.plot_style import dots, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS, FIRST = "output_tokens_per_second", "first_token_ms"


def draw(figures: dict[str, Any]) -> "Figure":
    """Draw the plot. Each row is a workload in a data type."""
    rows = [
        (f"{name}, {dtype}", present(run), workload["systems"])
        for dtype, run in figures["runs"].items()
        for name, workload in run["workloads"].items()
    ]
    heights = [0.7 + 0.3 * max(1, len(names)) for _, names, _ in rows]
    figure, axes = panels(
        len(rows), 2, height=0.9 + sum(heights), height_ratios=heights, sharey="row", squeeze=False
    )
    for (left, right), (title, names, systems) in zip(axes, rows, strict=True):
        for panel, quantity in ((left, TOKENS), (right, FIRST)):
            found = {name: systems[name][quantity] if name in systems else None for name in names}
            dots(panel, found, is_log=quantity == FIRST)
        left.set(title=title, xlabel="output tokens/s, median (line: lowest to highest)")
        right.set(xlabel="time to the first token, ms, p50 (line: to p99)")
    figure.suptitle(f"{figures['model']}, {figures['device_name']}")
    return figure


def present(run: dict[str, Any]) -> list[str]:
    """Return the systems that ran, ours first."""
    there = [name for name, row in run["systems"].items() if "absent" not in row]
    return sorted(there, key=lambda name: name not in run["ours"])
