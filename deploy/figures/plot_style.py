"""Style of every plot: fonts, grid, and one colour and marker for each system and policy.

Owns no numbers. Only the functions import matplotlib, which is an optional package and slow to import.
The colours are those of Okabe and Ito, which people with any colour vision can distinguish.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, YELLOW, GREY, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#7F7F7F", "#000000"
PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW, GREY)
OURS, THEIRS = BLUE, VERMILLION
"""Colours of plots that compare only two things."""
LIGHT, BORDER = "#E4E4E4", "#333333"
WIDTH_INCHES = 9.0
"""Width of a plot. Pages show it at about this width, so that its text keeps its size."""


@dataclass(frozen=True, slots=True)
class Look:
    colour: str
    marker: str = "o"
    is_hollow: bool = False
    """Whether this is a variant of the system that has the same colour and marker, filled."""

    def settings(self, size: float = 6) -> dict[str, Any]:
        return {
            "color": self.colour,
            "marker": self.marker,
            "markerfacecolor": "white" if self.is_hollow else self.colour,
            "markersize": size,
        }


OURS_LOOK, OTHER = Look(OURS), Look(GREY, "*")
SYSTEMS = {
    "blockyard cpu": OURS_LOOK,
    "blockyard triton": OURS_LOOK,
    "blockyard auto": OURS_LOOK,
    "Blockyard": OURS_LOOK,
    "Blockyard, sessions in plaintext": Look(OURS, is_hollow=True),
    "Blockyard, over HTTP": Look(SKY, "s"),
    "Blockyard, sessions in plaintext, over HTTP": Look(SKY, "s", is_hollow=True),
    "Blockyard of an earlier commit": Look(GREY),
    "blockyard torch": Look(SKY, "s"),
    "blockyard cpu-int8": Look(GREEN, "D"),
    "blockyard, nothing shared": Look(GREY, "^"),
    "blockyard, served": Look(PURPLE, "P"),
    "blockyard, served in plaintext": Look(PURPLE, "P", is_hollow=True),
    "blockyard, 2 ranks": Look(SKY, "s", is_hollow=True),
    "vllm": Look(VERMILLION, "v"),
    "openvino-genai": Look(ORANGE, "<"),
    "openvino-genai, exact KV": Look(ORANGE, "<", is_hollow=True),
    "transformers": Look(BLACK, "X"),
    "transformers, continuous": Look(BLACK, "X"),
    "transformers, static": Look(BLACK, "X", is_hollow=True),
    "sglang-router": Look(GREEN, "h"),
    "engine session, direct": Look(BLACK, "d"),
    "HTTP worker, direct": Look(BLACK, "d", is_hollow=True),
    "llm-d's schema": Look(VERMILLION, "p"),
}
POLICIES = {
    "prefix": OURS_LOOK,
    "dynamo": Look(VERMILLION, "v"),
    "session": Look(PURPLE, "P"),
    "least_loaded": Look(GREEN, "D"),
    "two_choices": Look(ORANGE, "s"),
    "round_robin": Look(GREY, "^"),
}


def look_of(system: str) -> Look:
    """Return the look of a system, by the first line of its name.

    A name with an option after a comma may have its own look. Otherwise it has that of the name without the option.
    """
    name = system.partition("\n")[0]
    return SYSTEMS.get(name) or SYSTEMS.get(name.partition(",")[0]) or OTHER


@contextmanager
def styled() -> Iterator[None]:
    """Apply our style to figures that are made, drawn and saved inside. Restore matplotlib's settings afterwards."""
    import matplotlib

    with matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.color": LIGHT,
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "savefig.dpi": 130,
        }
    ):
        yield


def panels(rows: int, columns: int, *, height: float, **settings: Any) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **settings)


def dots(
    axes: "Axes",
    rows: Mapping[str, Mapping[str, float] | None],
    *,
    is_log: bool,
    form: str = "{:,.0f}",
    look: Look | None = None,
) -> None:
    """Draw a dot with its range and number for each row. The row's name is its label.

    Without `look`, each row has the look of its name (`look_of`). A row has `lowest`, `median` and `highest`, or `p50`
    and `p99`. None is a row without a value.
    """
    for place, (name, row) in enumerate(rows.items()):
        if not row:
            continue
        its = look or look_of(name)
        names = ("p50", "p50", "p99") if "p50" in row else ("lowest", "median", "highest")
        low, value, high = (row[name] for name in names)
        axes.plot([low, high], [place, place], color=its.colour, linewidth=1.5)
        axes.plot(value, place, **its.settings(), zorder=4)
        number = axes.annotate(form.format(value), (value, place), (-3, 5), textcoords="offset points")
        number.set(fontsize=7, va="bottom", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0})
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.9)
    axes.grid(visible=False, axis="y")
    if not is_log:
        axes.margins(x=0.1)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:,g}")
    elif any(rows.values()):
        axes.set_xscale("log")  # This would fail if no row had a value.
        axes.margins(x=0.1)
        plain_log(axes.xaxis)


def plain_log(axis: "Axis") -> None:
    """Label the axis 1, 2, 5, 10 or, beyond two decades, 1, 3, 10, without exponents. Call it after drawing."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0, 3.0)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def legend(figure: "Figure", axes: "Axes") -> None:
    """Add a legend of the lines in `axes` above all panels of the figure."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=len(names))


def save(figure: "Figure", path: Path, footer: str = "") -> None:
    """Save a figure with a footer, which names the machine, date and commit of the numbers."""
    if footer:
        figure.supxlabel(footer, x=0.005, ha="left", fontsize=7, color=GREY)
    figure.savefig(path)
