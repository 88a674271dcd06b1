"""The router benchmark as one picture: the placement path, what a router adds to one stream, tokens/s a core.

Draws what figures.py computed; owns nothing but the look.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.router.figures import PLACEMENT_FLOOR_MS
from bench.router.placement import PROMPT_TOKENS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1f6f8b", "#c96f4a", "#8fb8c6", "#e4b9a3", "#555555", "#999999")
LIMIT = "#333333"


def draw(figures: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, centre, right) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    _draw_placement(left, figures["placement_ms"])
    _draw_one_stream(centre, figures["one_stream_ms"])
    _draw_cores(right, figures["streams"])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_placement(axes: "Axes", placement: dict[str, Any]) -> None:
    rows = {name: row for name, row in placement.items() if isinstance(row, dict)}
    names = list(rows)
    axes.bar(names, [rows[name]["p99"] for name in names], color=COLOURS[2], label="p99")
    axes.bar(names, [rows[name]["p50"] for name in names], color=COLOURS[0], label="p50")
    axes.axhline(PLACEMENT_FLOOR_MS, color=LIMIT, linestyle="--", linewidth=1)
    axes.set(title=f"token ids -> worker, {PROMPT_TOKENS:,} tokens", ylabel="ms")
    axes.legend()


def _draw_one_stream(axes: "Axes", one_stream: dict[str, Any]) -> None:
    names = list(one_stream)
    for offset, (way, colour) in enumerate((("first", COLOURS[1]), ("later", COLOURS[0]))):
        places = [place + 0.4 * offset for place in range(len(names))]
        axes.barh(
            places, [one_stream[name][way]["p99"] for name in names], height=0.4, color=colour, alpha=0.4
        )
        axes.barh(
            places,
            [one_stream[name][way]["p50"] for name in names],
            height=0.4,
            color=colour,
            label=f"{way}, p50",
        )
    axes.set_yticks([place + 0.2 for place in range(len(names))], names)
    axes.set_xscale("log")
    axes.set(title="one stream (pale: p99)", xlabel="ms, the worker's time apart")
    axes.legend()


def _draw_cores(axes: "Axes", streams: dict[str, Any]) -> None:
    systems = list(next(iter(streams.values())))
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        cores = [row[system]["tokens_per_cpu_second"] for row in streams.values()]
        medians = [core["median"] for core in cores]
        below = [core["median"] - core["lowest"] for core in cores]
        above = [core["highest"] - core["median"] for core in cores]
        places = [place + width * number for place in range(len(streams))]
        axes.bar(places, medians, width, yerr=(below, above), color=COLOURS[number], label=system)
    axes.set_xticks([place + width * (len(systems) - 1) / 2 for place in range(len(streams))], list(streams))
    axes.set(title="tokens/s a core of the router", xlabel="streams")
    axes.legend()
