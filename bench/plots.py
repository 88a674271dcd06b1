"""Draws the plot of a benchmark's report from its JSON.

    python -m bench.plots bench/reports/DATE-NAME.json ...

A benchmark that has a plot draws it with this module. A machine without matplotlib writes the report without a plot.
This command then draws the plot on another machine.
"""

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.deploy.figures.plot_style import save, styled

from bench.reporting import origin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS = {
    "runs": "bench.engine.plot",
    "rows": "bench.kernels.plot",
    "placement_ms": "bench.router.plot",
    "sharing": "bench.index.plot",
    "dynamo_simulator": "bench.placement.plot",
}
"""Module of each plot, by a figure that only its report has. Imported on use, because its packages may be missing."""


def draw(report: Path) -> bool:
    """Draw the plot into a file beside the report. Return False, and draw nothing, without matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    document = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))
    with styled():
        save(figure_of(document["figures"]), report.with_suffix(".png"), origin(document))
    return True


def figure_of(figures: dict[str, Any]) -> "Figure":
    """Draw a plot of a report's figures. Raise ValueError if there is no plot for them."""
    for figure, module in PLOTS.items():
        if figure in figures:
            drawn: Figure = import_module(module).draw(figures)
            return drawn
    raise ValueError(f"no plot for this report: it needs one of the figures {', '.join(PLOTS)}")


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m bench.plots REPORT.json ...")
    for report in map(Path, sys.argv[1:]):
        try:
            if not draw(report):
                raise SystemExit("plots need: pip install 'blockyard[plots]'")
        except ValueError as error:
            raise SystemExit(f"{report}: {error}") from None


if __name__ == "__main__":
    main()
