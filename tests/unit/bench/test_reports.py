"""Reports say what ran, where and how far it is proven, and each committed picture is drawn from its report again."""

import json
import re
import subprocess
import sys
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from blockyard.deploy.bench.machine import cpu, machine
from blockyard.deploy.figures.plot_style import OTHER, POLICIES, SYSTEMS, look_of, styled

from bench import plots, proof, reporting
from bench.engine.plot import present
from bench.plots import draw, figure_of
from bench.proof import Proof, RedTests, end_if_unproven, proof_of, prove
from bench.reporting import REPORTS, Floor, command_line, machine_text, origin, write_report

ROOT = Path(__file__).parents[3]
PICTURES = sorted(REPORTS.glob("*.png"), reverse=True)
MODULES = sorted(path for folder in ("bench", "deploy") for path in (ROOT / folder).rglob("*.py"))
OWN_LOOK = re.compile(
    r"^ *import matplotlib|pyplot|rcParams|[\"']#[0-9a-fA-F]{6}[\"']|[\"']tab:", re.MULTILINE
)
MAX_NAMES = 8
"""In a legend; more of them name their own rows."""
ZEN_3 = """processor\t: 0
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu fma sse4_2 avx2

processor\t: 1
model\t\t: 99
"""
ZEN_4 = ZEN_3.replace("model\t\t: 1\n", "model\t\t: 17\n").replace(
    "avx2", "avx2 avx512f avx512_vnni avx512_bf16"
)
H200 = {"name": "NVIDIA H200", "count": 1, "cuda": "12.8", "triton": "3.6.0"}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("/tmp/venv/bin/python", ".../python"),
        ("--vllm-python=/home/me/bin/python", "--vllm-python=.../python"),
        ("/a/b/,/c/d", ".../b,.../d"),
        ("tests/unit/worker/test_engine.py", "tests/unit/worker/test_engine.py"),
        ("float32,bfloat16", "float32,bfloat16"),
        ("two words", "'two words'"),
    ],
)
def test_a_command_is_told_without_the_machines_own_paths(word: str, told: str) -> None:
    assert command_line(["-m", "bench.engine"], ["-x", word]) == f"python -m bench.engine -x {told}"


def test_cpus_of_one_name_are_told_apart_and_one_that_says_nothing_is_no_error() -> None:
    zen_3, zen_4 = cpu(ZEN_3), cpu(ZEN_4)
    assert zen_3 == {
        "cpu": "AMD EPYC",
        "cpu_numbers": {"cpu family": 25, "model": 1, "stepping": 1},
        "vector_units": ["avx2", "fma"],
    }
    assert (zen_4["cpu"], zen_4["cpu_numbers"]["model"]) == ("AMD EPYC", 17)
    assert zen_4["vector_units"] == ["avx2", "avx512_bf16", "avx512_vnni", "avx512f", "fma"]
    text = machine_text({**zen_3, "cores": 2, "gpu": None})
    assert text == "AMD EPYC (cpu family 25, model 1, stepping 1; avx2, fma), 2 cores"
    for cpuinfo in (None, "", "processor\t: 0\nBogoMIPS\t: 50.00\n"):
        known = cpu(cpuinfo)
        assert (known["cpu_numbers"], known["vector_units"]) == ({}, [])
        assert machine_text({**known, "cores": 4, "gpu": None}) == f"{known['cpu']}, 4 cores"
    early = {"date": "2026-11-22", "commit": "1863780", "cpu": "AMD EPYC", "cores": 2}
    assert origin(early) == "2026-11-22, commit 1863780, AMD EPYC, 2 cores"


def test_a_report_names_its_command_and_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["whatever", "--output", str(tmp_path)])
    monkeypatch.setattr(reporting, "gpu", lambda: H200)
    floor = Floor(name="f", value=1.0, floor=1.0, better="higher")
    path = write_report("x", title="X", text="Y", figures={}, floors=[floor], versions={}, folder=tmp_path)
    text, twin = path.read_text(encoding="utf-8"), json.loads(path.with_suffix(".json").read_text())
    assert twin["command"].endswith(f" --output .../{tmp_path.name}")
    assert f"```bash\n{twin['command']}\n```" in text
    assert str(tmp_path) not in text + json.dumps(twin)
    assert "1 x NVIDIA H200 (CUDA 12.8, triton 3.6.0)" in text
    assert twin["gpu"] == H200
    assert twin.keys() >= machine().keys()


def test_an_unproven_report_says_so_first_and_replaces_no_other(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"title": "X", "text": "Y", "figures": {}, "floors": [], "versions": {}}
    proven = write_report("x", folder=tmp_path, **settings)
    unproven = write_report("x", folder=tmp_path, **settings, unproven="2 failed", is_cut_short=True)
    assert unproven.name == proven.name.replace("x.md", "x-cut-short-unproven.md")
    assert unproven.read_text(encoding="utf-8").startswith("# X\n\n**UNPROVEN: 2 failed.**\n")
    assert "UNPROVEN" not in proven.read_text(encoding="utf-8")
    of_each = [json.loads(path.with_suffix(".json").read_text())["unproven"] for path in (proven, unproven)]
    assert of_each == [None, "2 failed"]


def test_no_figure_comes_of_a_red_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is replaced by its last line. tests/nightly/bench runs real tests."""

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        code, last = {"green": (0, "3 passed, 1 skipped"), "red": (1, "1 failed, 2 passed")}.get(
            command[-1], (0, "no tests ran")
        )
        return subprocess.CompletedProcess(command, code, stdout=f"...\n== {last} in 1.0s ==\n", stderr="")

    monkeypatch.setattr(proof.subprocess, "run", run)
    assert prove(["green"]).startswith("3 tests passed")
    for tests in ("red", "none"):
        with pytest.raises(RedTests, match="no benchmark on a red test"):
            prove([tests])
    both = proof_of([["green"], ["red"]], device="cpu", is_skipped=False)
    assert both.proven.startswith("3 tests passed")
    assert both.unproven.startswith("1 failed")
    skipped = proof_of([["red"]], device="cpu", is_skipped=True)
    assert skipped.proven == "nothing"
    end_if_unproven(skipped, is_skipped=True)
    with pytest.raises(SystemExit, match="UNPROVEN: 1 failed"):
        end_if_unproven(Proof(proven="nothing", unproven="1 failed"), is_skipped=False)


def figures_in(picture: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))["figures"]
    return figures


def has_labels(axes: Any) -> bool:
    """The labels of the panel to its left are its own too."""
    is_shared = len(axes.get_shared_y_axes().get_siblings(axes)) > 1
    return axes.get_ylabel() or any(label.get_text() for label in axes.get_yticklabels()) or is_shared


@pytest.mark.quick_cases(3)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_each_committed_picture_is_drawn_again_with_labels_and_short_legends(
    picture: Path, tmp_path: Path
) -> None:
    """No bar is on a logarithmic axis, and the text of an engine's picture is the medians of its report."""
    pytest.importorskip("matplotlib")
    from matplotlib.patches import Rectangle

    copy(picture.with_suffix(".json"), tmp_path)
    assert draw(tmp_path / f"{picture.stem}.md")
    assert (tmp_path / picture.name).read_bytes().startswith(b"\x89PNG")
    figures = figures_in(picture)
    with styled():
        figure = figure_of(figures)
    assert all(len(legend.get_texts()) <= MAX_NAMES for legend in figure.legends)
    for axes in figure.axes:
        assert axes.get_legend() is None
        assert axes.get_xlabel()
        assert has_labels(axes)
        if "log" in (axes.get_xscale(), axes.get_yscale()):
            assert not any(isinstance(patch, Rectangle) for patch in axes.patches)
    if "-engine" in picture.stem:
        assert [text.get_text() for axes in figure.axes[::2] for text in axes.texts] == [
            f"{workload['systems'][name]['output_tokens_per_second']['median']:,.0f}"
            for run in figures["runs"].values()
            for workload in run["workloads"].values()
            for name in present(run)
            if name in workload["systems"]
        ]


def test_each_system_has_one_look_that_no_other_of_a_picture_has() -> None:
    rows: list[list[str]] = []
    for figures in map(figures_in, PICTURES):
        rows += [list(present(run)) for run in figures.get("runs", {}).values()]
        rows += [list(figures.get("one_stream_ms", {})), *map(list, figures.get("streams", {}).values())]
    named = {name for row in rows for name in row}
    assert len(named) > 10
    assert {name for name in named if look_of(name) is OTHER} == set()
    assert all(len({look_of(name) for name in row}) == len(row) for row in rows)
    assert look_of("blockyard triton, KV in int8") == look_of("blockyard triton")
    assert look_of("blockyard, nothing shared") != look_of("blockyard cpu")
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


def test_the_command_says_which_report_has_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "pool.json"
    report.write_text('{"figures": {}}', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bench.plots", str(report)])
    with pytest.raises(SystemExit, match="no plot for this report: it needs one of the figures runs, rows, "):
        plots.main()
