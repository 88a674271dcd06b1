"""Plot of the index report: bytes per block and look-up time over the number of workers that share the blocks."""

from typing import TYPE_CHECKING, Any

from blockyard.deploy.figures.plot_style import legend, look_of, panels, plain_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEMS = {"blockyard": "Blockyard", "llmd": "llm-d's schema"}


def draw(figures: dict[str, Any]) -> "Figure":
    sharers = [int(number) for number in figures["sharing"]]
    cases = figures["sharing"].values()
    figure, axes = panels(1, 3, height=3.3)
    for panel, title, unit, figure_name in (
        (axes[0], "Memory", "bytes a block", ""),
        (axes[1], "Look-up: CPU time of Redis", "microseconds", "server_cpu_us"),
        (axes[2], "Look-up: waiting time of the client", "microseconds, p50", "wall_p50_us"),
    ):
        for key, name in SYSTEMS.items():
            values = [
                case[key][figure_name] if figure_name else case[f"{key}_bytes_a_block"] for case in cases
            ]
            panel.plot(sharers, values, **look_of(name).settings(), label=name)
        panel.set(title=title, xlabel="workers that hold the block", ylabel=unit, yscale="log")
        panel.set_xscale("log", base=2)
        plain_log(panel.yaxis)
        panel.set_xticks(sharers, [str(number) for number in sharers])
    legend(figure, axes[0])
    return figure
