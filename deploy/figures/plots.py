"""Plots of the textbook figures, one PNG each. Draws the numbers of figures.py, and computes none itself."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.deploy.figures.figures import Figures
from blockyard.deploy.figures.memory import Cells
from blockyard.deploy.figures.plot_style import (
    BORDER,
    GREY,
    LIGHT,
    OURS,
    PALETTE,
    THEIRS,
    legend,
    panels,
    save,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAP_COLUMNS = 64
SHOWN_STEPS = 1024
"""Steps of batching that are shown: about four static batches."""
_SETTINGS_FOLDER = "MPLCONFIGDIR"


def draw_figures(figures: Figures, folder: Path) -> list[Path]:
    """Write the plots into `folder`, which is created if missing, and return their paths. Raise OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with _temporary_settings_folder():
        return _draw(figures, folder)


@contextmanager
def _temporary_settings_folder() -> Iterator[None]:
    """Keep matplotlib's settings and font list in a temporary folder, unless the user has set a folder."""
    if _SETTINGS_FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="by-figures-") as settings:
        os.environ[_SETTINGS_FOLDER] = settings
        try:
            yield
        finally:
            del os.environ[_SETTINGS_FOLDER]


def _draw(figures: Figures, folder: Path) -> list[Path]:
    drawings: dict[str, Callable[[Figures], Figure]] = {
        "slots": _slots,
        "memory": _memory,
        "fragmentation": _fragmentation,
        "arrivals": _arrivals,
        "copy-on-write": _copy_on_write,
        "block-sizes": _block_sizes,
    }
    paths = []
    with styled():
        for name, draw in drawings.items():
            paths.append(folder / f"{name}.png")
            save(draw(figures), paths[-1])
    return paths


def _slots(figures: Figures) -> "Figure":
    f = figures.slots
    figure, axes = panels(2, 1, height=3.6, sharex=True, sharey=True)
    for ax, name, busy, value, colour in (
        (axes[0], "static", f.static_busy, f.static, THEIRS),
        (axes[1], "continuous", f.continuous_busy, f.continuous, OURS),
    ):
        ax.stairs(busy[:SHOWN_STEPS], fill=True, color=colour)
        ax.set_title(f"{name.capitalize()} batching: {value:.1%} of the slots yield a token")
        ax.set_ylabel("busy slots")
        ax.set_yticks(range(f.slots + 1))
    axes[1].set_xlabel(f"step (the first {SHOWN_STEPS:,} of {f.static_steps:,} and {f.continuous_steps:,})")
    return figure


def _memory(figures: Figures) -> "Figure":
    f = figures.memory
    figure, (left, right) = panels(1, 2, height=3)
    _bars(
        left, ["contiguous", "paged"], [f.contiguous_utilisation * 100, f.paged_utilisation * 100], "{:.1f} %"
    )
    left.set_title("Share of the memory taken that holds tokens")
    left.set_ylabel("slots with a token, %")
    names = ["contiguous", "paged,\nby blocks", "paged, as\nadmitted"]
    _bars(right, names, [1.0, f.times_the_sequences, f.times_the_sequences_run], "{:.1f} x")
    right.set_title("How many sequences fit the same memory")
    right.set_ylabel("times the contiguous ones")
    return figure


def _bars(ax: "Axes", names: Sequence[str], values: Sequence[float], template: str) -> None:
    colours = [THEIRS, *[OURS] * (len(values) - 1)]
    bars = ax.bar(names, values, color=colours, width=0.6)
    ax.bar_label(bars, [template.format(value) for value in values], padding=2)
    ax.margins(y=0.15)


def _fragmentation(figures: Figures) -> "Figure":
    f = figures.fragmentation
    figure, axes = panels(2, 1, height=2.4)
    _map(axes[0], f.contiguous_cells)
    axes[0].set_title(
        f"Contiguous: {f.worst_free:,} tokens free, the largest piece {f.worst_largest_piece}; "
        f"{f.worst_wanted} requested and refused",
    )
    _map(axes[1], f.paged_cells)
    axes[1].set_title(
        f"Paged, the same step of the same stream: {f.paged_free} tokens free, every free block usable",
    )
    figure.supxlabel(
        "a cell is 16 tokens; a dark line: another holder (the eight colours repeat); "
        "pale: reserved and still empty; white: free",
        fontsize=9,
    )
    return figure


def _map(ax: "Axes", cells: Cells) -> None:
    from matplotlib.colors import to_rgb

    pixels = []
    for owner, full in cells:
        red, green, blue = to_rgb(PALETTE[owner % len(PALETTE)])
        strength = 0.0 if owner < 0 else 0.25 + 0.75 * full
        pixels.append([1 - strength * (1 - part) for part in (red, green, blue)])
    rows = [pixels[start : start + MAP_COLUMNS] for start in range(0, len(pixels), MAP_COLUMNS)]
    ax.pcolormesh([[tuple(pixel) for pixel in row] for row in rows], edgecolors=LIGHT, linewidth=0.4)
    edges = [number for number in range(1, len(cells)) if cells[number][0] != cells[number - 1][0]]
    rows_of, columns_of = [edge // MAP_COLUMNS for edge in edges], [edge % MAP_COLUMNS for edge in edges]
    ax.vlines(columns_of, rows_of, [row + 1 for row in rows_of], colors=BORDER, linewidth=1.2)
    ax.invert_yaxis()
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])


def _arrivals(figures: Figures) -> "Figure":
    f = figures.arrivals
    figure, (top, bottom) = panels(2, 1, height=4.2, sharex=True)
    for name, samples, colour in (
        ("contiguous, 2048 reserved", f.contiguous, THEIRS),
        ("paged", f.paged, OURS),
    ):
        steps = [sample.step for sample in samples]
        top.plot(steps, [sample.running for sample in samples], color=colour, label=name)
        used = [100 * sample.tokens / sample.memory for sample in samples]
        bottom.plot(steps, used, color=colour, label=name)
    top.set_title("Sequences that run at once")
    top.set_ylabel("running sequences")
    bottom.set_title("Share of all memory that holds tokens")
    bottom.set_ylabel("slots with a token, %")
    bottom.set_xlabel(f"step; the same {f.num_requests} arrivals")
    bottom.set_ylim(0, 100)
    legend(figure, top)
    return figure


def _copy_on_write(figures: Figures) -> "Figure":
    f = figures.copy_on_write
    figure, (left, right) = panels(1, 2, height=3, width_ratios=[2, 1])
    names = ["not shared", "16 chats", "fork of 16", "fork, before\nits first write"]
    _bars(left, names, [f.unshared, f.chats, f.fork_after_write, f.fork_before_write], "{:.0f}")
    left.set_title("16 outputs on the same 200 tokens")
    left.set_ylabel("blocks held")
    _bars(right, ["not shared", "4 beams"], [f.beams_unshared, f.beams], "{:.0f}")
    right.set_title("Beams on 48 + 16 tokens")
    right.set_ylabel("blocks held")
    right.yaxis.get_major_locator().set_params(integer=True)
    return figure


def _block_sizes(figures: Figures) -> "Figure":
    sizes = figures.block_sizes
    names = [str(size.block_size) for size in sizes]
    figure, (left, right) = panels(1, 2, height=3.4)
    left.plot(names, [100 * size.empty_share for size in sizes], color=THEIRS, marker="o")
    left.set_title("Memory left empty in last blocks")
    left.set_ylabel("used memory without a token, %")
    right.plot(
        names, [100 * size.reuse for size in sizes], color=OURS, marker="o", label="found in the cache"
    )
    possible = 100 * sizes[0].possible_reuse
    right.axhline(
        possible,
        color=GREY,
        linestyle="--",
        linewidth=1,
        zorder=0,
        label="in an earlier prompt, so possible to find",
    )
    right.set_title("Tokens of shared prompts found in the cache")
    right.set_ylabel("prompt tokens found in the cache, %")
    legend(figure, right)
    for ax in (left, right):
        ax.set_ylim(bottom=0)
        ax.set_xlabel("tokens in a block")
    return figure
