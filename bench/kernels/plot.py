"""Kernels beside the roofline as one picture: FLOP/s over FLOPs a byte, and the share of the roofline by kernel.

    python -m bench.kernels.plot bench/reports/DATE-kernels.json

draws beside a report what the machine that measured could not, for want of matplotlib. Owns nothing but the look.
"""

import json
import sys
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]


def draw(figures: dict[str, Any], path: Path) -> bool:
    """Whether it could be drawn."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kernels: dict[str, list[Row]] = {}
    for row in figures["rows"]:
        kernels.setdefault(row["kernel"], []).append(row)
    colours = dict(zip(kernels, cycle(matplotlib.colormaps["tab20"].colors)))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 6), layout="constrained")
    _draw_roofline(left, figures["machine"], kernels, colours)
    _draw_shares(right, kernels, colours)
    figure.suptitle(f"Kernel backend {figures['backend']}, {figures['dtype']}, {figures['device_name']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _draw_roofline(
    axes: "Axes", machine: dict[str, float], kernels: dict[str, list[Row]], colours: dict[str, Any]
) -> None:
    copy, matmul = 1e9 * machine["copy_gb_per_second"], 1e12 * machine["matmul_tflops_per_second"]
    for kernel, rows in kernels.items():
        computing = [row for row in rows if row["flops"]]
        intensities = [row["flops"] / row["bytes"] for row in computing]
        rates = [row["flops"] / row["us"] * 1e6 for row in computing]
        axes.scatter(intensities, rates, s=14, color=colours[kernel], label=kernel if computing else None)
    known = [row["flops"] / row["bytes"] for rows in kernels.values() for row in rows if row["flops"]]
    ridge = matmul / copy
    low, high = min([ridge, *known]), max([ridge, *known])
    axes.plot([low, ridge, high], [copy * low, matmul, matmul], color="black")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs a byte",
        ylabel="FLOP/s",
        title="each shape; line: copy bandwidth and matmul rate of the same run",
    )
    axes.legend(fontsize="x-small")


def _draw_shares(axes: "Axes", kernels: dict[str, list[Row]], colours: dict[str, Any]) -> None:
    for place, (kernel, rows) in enumerate(kernels.items()):
        shares = [100 * row["of_roofline"] for row in rows]
        axes.scatter([place] * len(shares), shares, s=14, color=colours[kernel])
        axes.plot([place - 0.3, place + 0.3], [median(shares)] * 2, color=colours[kernel])
    axes.axhline(100, color="black", linewidth=0.8)
    axes.set_xticks(range(len(kernels)), list(kernels), rotation=40, ha="right", fontsize="small")
    axes.set(ylim=(0, None), title="% of the roofline, each shape (line: median)")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m bench.kernels.plot REPORT.json")
    report = Path(sys.argv[1])
    if not draw(json.loads(report.read_text(encoding="utf-8"))["figures"], report.with_suffix(".png")):
        raise SystemExit("matplotlib is not installed")


if __name__ == "__main__":
    main()
