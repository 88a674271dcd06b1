"""Plot of the router benchmark: the placement path, a router's added delay for one stream, and tokens/s per core."""

from typing import TYPE_CHECKING, Any

from blockyard.deploy.figures.plot_style import BORDER, OURS_LOOK, dots, panels

from bench.router.figures import PLACEMENT_FLOOR_MS
from bench.router.placement import PROMPT_TOKENS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LATENCY = "ms, p50 (line: to p99)"


def draw(figures: dict[str, Any]) -> "Figure":
    placement = {name: row for name, row in figures["placement_ms"].items() if isinstance(row, dict)}
    one_stream = figures["one_stream_ms"]
    cores = {
        f"{name}\n{count} streams": row["tokens_per_cpu_second"]
        for count, systems in figures["streams"].items()
        for name, row in systems.items()
    }
    heights = [0.8 + 0.38 * max(len(placement), len(cores)), 0.8 + 0.38 * len(one_stream)]
    figure, ((path, core), streams) = panels(2, 2, height=0.4 + sum(heights), height_ratios=heights)
    dots(path, placement, is_log=False, form="{:.2f}", look=OURS_LOOK)
    path.axvline(PLACEMENT_FLOOR_MS, color=BORDER, linestyle="--", linewidth=1)
    path.set(title=f"Token ids to worker, {PROMPT_TOKENS:,} tokens", xlabel=f"{LATENCY}; dashed: the goal")
    dots(core, cores, is_log=False)
    core.set(title="Router's output for its CPU time", xlabel="tokens/s per core (line: lowest to highest)")
    for axes, way, title in zip(
        streams, ("first", "later"), ("First token", "Each later token"), strict=True
    ):
        dots(axes, {name: row[way] for name, row in one_stream.items()}, is_log=True, form="{:.2f}")
        axes.set(title=f"{title} of one stream", xlabel=f"{LATENCY}, without the worker's time")
    return figure
