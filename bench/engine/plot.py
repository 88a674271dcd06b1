"""The engine benchmark as one picture: output tokens/s and time to the first token of each system, by workload.

Draws what figures.py computed; owns nothing but the look. Without matplotlib there is no picture.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = ("#123f6b", "#2e86c9", "#8cc6ea", "#12796f", "#5fc4ac", "#6b4fa0", "#b39ad6")
THEIRS = ("#a3301c", "#e2672f", "#f2a65a", "#e0c341", "#7a5c45", "#8a8a8a", "#c4c4c4")
"""Cold and warm: one each."""


def draw(figures: dict[str, Any], path: Path) -> bool:
    """Whether it could be drawn. A row of it is a data type."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = figures["runs"]
    figure, rows = pyplot.subplots(
        len(runs), 2, figsize=(16, 4.5 * len(runs)), layout="constrained", squeeze=False
    )
    for (left, right), (dtype, run) in zip(rows, runs.items(), strict=True):
        colours = colours_of(run)
        for axes, quantity, title in (
            (left, "output_tokens_per_second", f"{dtype}: output tokens/s, median (line: lowest to highest)"),
            (right, "first_token_ms", f"{dtype}: ms to the first token, p50 (line: to p99)"),
        ):
            _draw(axes, run["workloads"], quantity, colours)
            axes.set(title=title)
        left.set_ylim(bottom=0)
        if any(workload["systems"] for workload in run["workloads"].values()):
            right.set_yscale("log")  # of nothing it is an error
            right.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.suptitle(f"{figures['model']}, {figures['device_name']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def colours_of(run: dict[str, Any]) -> dict[str, str]:
    """Of those that are there."""
    present = [name for name, row in run["systems"].items() if "absent" not in row]
    ours = [name for name in run["ours"] if name in present]
    theirs = [name for name in present if name not in ours]
    return {
        **{name: OURS[number % len(OURS)] for number, name in enumerate(ours)},
        **{name: THEIRS[number % len(THEIRS)] for number, name in enumerate(theirs)},
    }


def _draw(axes: "Axes", workloads: dict[str, Any], quantity: str, colours: dict[str, str]) -> None:
    width = 0.85 / max(1, len(colours))
    for number, (system, colour) in enumerate(colours.items()):
        places, heights, below, above = [], [], [], []
        for place, workload in enumerate(workloads.values()):
            if system not in workload["systems"]:
                continue
            low, value, high = _spread(workload["systems"][system][quantity])
            places.append(place + width * number)
            heights.append(value)
            below.append(value - low)
            above.append(high - value)
        if quantity == "first_token_ms":  # on a logarithmic axis a bar's length says nothing
            axes.errorbar(places, heights, (below, above), fmt="o", color=colour, label=system)
        else:
            axes.bar(places, heights, width, yerr=(below, above), color=colour, label=system)
    axes.set_xticks(
        [place + width * (len(colours) - 1) / 2 for place in range(len(workloads))], list(workloads)
    )


def _spread(shares: dict[str, float]) -> tuple[float, float, float]:
    if "p50" in shares:
        return shares["p50"], shares["p50"], shares["p99"]
    return shares["lowest"], shares["median"], shares["highest"]
