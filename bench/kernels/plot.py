"""Plot of kernels beside the roofline: FLOP/s over FLOPs per byte, and the share of the roofline by kernel."""

from statistics import median
from typing import TYPE_CHECKING, Any

from blockyard.deploy.figures import plot_style as style
from blockyard.deploy.figures.plot_style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
FAMILIES = {
    "attention of decodes": (Look(style.BLUE), ("decode attention",)),
    "attention of prompts": (Look(style.VERMILLION, "v"), ("prefill attention", "mixed attention")),
    "linears": (Look(style.ORANGE, "s"), ("linear",)),
    "norms, rotary, SiLU": (Look(style.PURPLE, "P"), ("rms_norm", "add_rms_norm", "silu_mul", "rotary")),
    "KV writes": (Look(style.GREEN, "D"), ("write_kv", "qk_norm_rope_write", "place_heads")),
    "copies of blocks": (Look(style.SKY, "<"), ("copy_blocks", "blocks ")),
    "embedding and draws": (Look(style.BLACK, "X"), ("embed", "draw", "greedy tokens", "likeliest token")),
    "other": (Look(style.GREY, "^"), ("",)),
}
"""Look of each family, and the beginnings of its kernels' names."""
SETTINGS = {"linestyle": "none", "markeredgewidth": 0, "alpha": 0.75}


def draw(figures: dict[str, Any]) -> "Figure":
    families: dict[str, dict[str, list[Row]]] = {name: {} for name in FAMILIES}
    for row in figures["rows"]:
        families[family_of(row["kernel"])].setdefault(row["kernel"], []).append(row)
    num_kernels = sum(map(len, families.values()))
    heights = (3.8, 0.6 + 0.18 * num_kernels)
    figure, (top, bottom) = style.panels(2, 1, height=0.8 + sum(heights), height_ratios=heights)
    _draw_roofline(top, figures["machine"], families)
    setting = f"Kernel backend {figures['backend']}, {figures['dtype']}, {figures['device_name']}"
    top.set_title(
        f"{setting}\nEach shape that computes (line: copy bandwidth and matmul rate of the same run)"
    )
    _draw_shares(bottom, families)
    style.legend(figure, top)
    return figure


def family_of(kernel: str) -> str:
    return next(family for family, (_, starts) in FAMILIES.items() if kernel.startswith(starts))


def _draw_roofline(
    axes: "Axes", machine: dict[str, float], families: dict[str, dict[str, list[Row]]]
) -> None:
    copy, matmul = 1e9 * machine["copy_gb_per_second"], 1e12 * machine["matmul_tflops_per_second"]
    ridge = matmul / copy
    known = [ridge]
    for family, kernels in families.items():
        computing = [row for rows in kernels.values() for row in rows if row["flops"]]
        intensities = [row["flops"] / row["bytes"] for row in computing]
        rates = [row["flops"] / row["us"] * 1e6 for row in computing]
        if computing:
            axes.plot(intensities, rates, **(FAMILIES[family][0].settings(5) | SETTINGS), label=family)
        known += intensities
    axes.plot([min(known), ridge, max(known)], [copy * min(known), matmul, matmul], color=style.BORDER)
    axes.set(xscale="log", yscale="log", xlabel="intensity, FLOPs a byte", ylabel="rate, FLOP/s")


def _draw_shares(axes: "Axes", families: dict[str, dict[str, list[Row]]]) -> None:
    names: list[str] = []
    for family, kernels in families.items():
        look = FAMILIES[family][0]
        for kernel, rows in kernels.items():
            place, shares = len(names), [100 * row["of_roofline"] for row in rows]
            axes.plot(shares, [place] * len(shares), **(look.settings(5) | SETTINGS))
            axes.plot([median(shares)] * 2, [place - 0.4, place + 0.4], color=look.colour, linewidth=2)
            names.append(kernel)
    axes.axvline(100, color=style.BORDER, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set(xlim=(0, None), xlabel="share of the roofline, % (each shape; line: median)")
