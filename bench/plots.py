"""The picture of a benchmark's report, drawn from its JSON.

    python -m bench.plots bench/reports/DATE-NAME.json ...

Each benchmark draws its own in the same way. A machine without matplotlib keeps its report without a picture, and
this command draws it anywhere.
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
"""By the figure that only such a report has. A machine that runs one benchmark may lack what another one imports."""


def draw(report: Path) -> bool:
    """Whether the picture now lies beside the report: without matplotlib there is none."""
    if find_spec("matplotlib") is None:
        return False
    document = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))
    with styled():
        save(figure_of(document["figures"]), report.with_suffix(".png"), origin(document))
    return True


def figure_of(figures: dict[str, Any]) -> "Figure":
    """Raises ValueError where such reports have no picture."""
    for figure, module in PLOTS.items():
        if figure in figures:
            drawn: Figure = import_module(module).draw(figures)
            return drawn
    raise ValueError(f"a report needs one of the figures {', '.join(PLOTS)} for a picture")


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m bench.plots REPORT.json ...")
    for report in map(Path, sys.argv[1:]):
        try:
            if not draw(report):
                raise SystemExit("pictures need: pip install 'blockyard[plots]'")
        except ValueError as error:
            raise SystemExit(f"{report}: {error}") from None


if __name__ == "__main__":
    main()
