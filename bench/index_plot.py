"""The picture of bench/index.py's report: bytes a block and look-up time over how many workers share the blocks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display: a file is all that is wanted
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"Blockyard": "tab:blue", "llm-d's schema": "tab:orange"}


def plot(by_sharers: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """`by_sharers` as in the report's figures: the number of sharers as text -> what was measured."""
    sharers = [int(number) for number in by_sharers]
    cases = list(by_sharers.values())
    figure, (memory, server, wall) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    _lines(
        memory,
        sharers,
        [case["blockyard_bytes_a_block"] for case in cases],
        [case["llmd_bytes_a_block"] for case in cases],
    )
    _panel(memory, "memory", "bytes a block")
    for axes, figure_name, title, unit in (
        (server, "server_cpu_us", "look-up: CPU time of Redis", "microseconds"),
        (wall, "wall_p50_us", "look-up: as the client waits", "microseconds, p50"),
    ):
        _lines(
            axes,
            sharers,
            [case["blockyard"][figure_name] for case in cases],
            [case["llmd"][figure_name] for case in cases],
        )
        _panel(axes, title, unit)
    memory.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(axes: Axes, sharers: list[int], ours: list[float], theirs: list[float]) -> None:
    for (label, colour), values in zip(COLOURS.items(), (ours, theirs), strict=True):
        axes.plot(sharers, values, marker="o", label=label, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sharers, [str(number) for number in sharers])


def _panel(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("workers that hold the block")
    axes.set_ylabel(unit)
    axes.grid(visible=True, which="both", alpha=0.3)
