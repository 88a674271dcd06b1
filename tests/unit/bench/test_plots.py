"""Every committed plot belongs to a committed report, and is drawn from it again in one style."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from typing import TYPE_CHECKING, Any

import pytest
from blockyard.deploy.figures.plot_style import OTHER, POLICIES, SYSTEMS, look_of, styled

from bench.engine.plot import present
from bench.plots import draw, figure_of
from bench.reporting import REPORTS, origin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[3]
PICTURES = sorted(REPORTS.glob("*.png"))
MODULES = sorted(path for folder in ("bench", "deploy") for path in (ROOT / folder).rglob("*.py"))
OWN_LOOK = re.compile(
    r"^ *import matplotlib|pyplot|rcParams|[\"']#[0-9a-fA-F]{6}[\"']|[\"']tab:", re.MULTILINE
)
MAX_NAMES = 8
"""In a legend; more of them name their own rows."""


def figures_of(picture: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))["figures"]
    return figures


@pytest.fixture(params=PICTURES, ids=lambda picture: picture.stem)
def figure(request: pytest.FixtureRequest) -> Iterator["Figure"]:
    pytest.importorskip("matplotlib")
    with styled():
        yield figure_of(figures_of(request.param))


@pytest.mark.quick_cases(2)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_each_committed_report_with_a_picture_is_drawn_again_without_a_warning(
    picture: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    copy(picture.with_suffix(".json"), tmp_path)
    assert draw(tmp_path / f"{picture.stem}.md")
    assert (tmp_path / picture.name).read_bytes().startswith(b"\x89PNG")


def test_axes_have_labels_legends_are_short_and_outside_and_no_bar_is_on_a_log_axis(figure: "Figure") -> None:
    from matplotlib.patches import Rectangle

    assert all(len(legend.get_texts()) <= MAX_NAMES for legend in figure.legends)
    for axes in figure.axes:
        assert axes.get_legend() is None
        assert axes.get_xlabel()
        assert axes.get_ylabel() or any(label.get_text() for label in axes.get_yticklabels()) or shares(axes)
        if "log" in (axes.get_xscale(), axes.get_yscale()):
            assert not any(isinstance(patch, Rectangle) for patch in axes.patches)


@pytest.mark.parametrize("picture", sorted(REPORTS.glob("*-engine*.png")), ids=lambda picture: picture.stem)
def test_an_engine_picture_tells_the_medians_of_its_report(picture: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = figures_of(picture)
    told = [text.get_text() for axes in figure_of(figures).axes[::2] for text in axes.texts]
    assert told == [
        f"{workload['systems'][name]['output_tokens_per_second']['median']:,.0f}"
        for run in figures["runs"].values()
        for workload in run["workloads"].values()
        for name in present(run)
        if name in workload["systems"]
    ]


def shares(axes: Any) -> bool:
    """The labels of the panel to its left are its own too."""
    return len(axes.get_shared_y_axes().get_siblings(axes)) > 1


def test_each_row_has_the_look_of_its_system_in_every_picture() -> None:
    named = {
        name
        for picture in PICTURES
        for figures in [figures_of(picture)]
        for name in (
            *(name for run in figures.get("runs", {}).values() for name in present(run)),
            *figures.get("one_stream_ms", {}),
            *(name for row in figures.get("streams", {}).values() for name in row),
        )
    }
    assert len(named) > 10
    assert {name for name in named if look_of(name) is OTHER} == set()
    assert look_of("blockyard triton, KV in int8") == look_of("blockyard triton")
    assert look_of("blockyard, nothing shared") != look_of("blockyard cpu")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_no_two_systems_of_a_picture_look_alike(picture: Path) -> None:
    for run in figures_of(picture).get("runs", {}).values():
        assert len({look_of(name) for name in present(run)}) == len(present(run))
    for row in (
        figures_of(picture).get("one_stream_ms", {}),
        *figures_of(picture).get("streams", {}).values(),
    ):
        assert len({look_of(name) for name in row}) == len(row)


def test_peers_never_have_our_colour_and_no_two_policies_look_alike() -> None:
    ours = {look.colour for name, look in SYSTEMS.items() if name in ("blockyard cpu", "Blockyard")}
    assert len(ours) == 1
    peers = [look for name, look in SYSTEMS.items() if "blockyard" not in name.lower()]
    assert ours.isdisjoint(look.colour for look in peers)
    assert len(set(POLICIES.values())) == len(POLICIES)


def test_no_module_has_colours_or_settings_of_its_own() -> None:
    own = {
        str(path.relative_to(ROOT))
        for path in MODULES
        if "matplotlib" in (text := path.read_text(encoding="utf-8")) and OWN_LOOK.search(text)
    }
    assert own == {"deploy/figures/plot_style.py"}


def test_the_footer_leaves_out_what_an_early_report_does_not_say() -> None:
    early = {"date": "2026-11-22", "commit": "1863780", "cpu": "AMD EPYC", "cores": 2}
    assert origin(early) == "2026-11-22, commit 1863780, AMD EPYC, 2 cores"


def test_the_command_says_which_report_has_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "pool.json"
    report.write_text('{"figures": {}}', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "bench.plots", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"{report}: no plot for this report: it needs one of the figures runs, rows, "
    )
