"""The command `figures` computes, compares and draws its figures; and the contiguous memory that it simulates."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.figures.figures import Comparison, Figures, compute_figures, figures_table
from blockyard.deploy.figures.memory import ContiguousMemory
from blockyard.deploy.figures.plots import draw_figures
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console


@pytest.fixture(scope="module")
def figures() -> Figures:
    return compute_figures()


@pytest.mark.ci
def test_the_command_prints_what_was_computed_as_json(
    figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "blockyard.deploy.figures.figures.compute_figures", lambda: figures
    )  # only to save seconds
    result = CliRunner().invoke(main, ["figures", "--output", "json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == figures.as_dict()


def test_every_figure_of_the_issue_is_in_the_json(figures: Figures) -> None:
    document = figures.as_dict()
    assert list(document) == [
        "slots",
        "memory",
        "fragmentation",
        "arrivals",
        "copy_on_write",
        "block_sizes",
        "comparisons",
    ]
    assert [size["block_size"] for size in document["block_sizes"]] == [16, 32, 64, 128]
    assert set(document["arrivals"]["peak_running"]) == {"contiguous", "paged"}


def test_the_table_shows_both_numbers_and_says_how_they_differ(figures: Figures) -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(figures_table(figures))
    lines = console.export_text().splitlines()
    (static,) = (line for line in lines if "static batching" in line)
    assert static.count("46.9%") == 2
    assert "differs" not in static
    (admitted,) = (line for line in lines if "as the scheduler admits" in line)
    assert "differs: below the textbook" in admitted
    (paged,) = (line for line in lines if "paged memory in use" in line)
    assert "differs: above the textbook" in paged


@pytest.mark.parametrize(("ours", "agrees"), [(0.4688, True), (0.4680, False)])
def test_a_figure_agrees_where_it_prints_like_the_textbook(ours: float, agrees: bool) -> None:
    comparison = Comparison(group="g", name="n", value=ours, unit="%", textbook=0.469)
    assert comparison.agrees is agrees


@pytest.mark.ci
def test_each_figure_becomes_a_picture(figures: Figures, tmp_path: Path) -> None:
    paths = draw_figures(figures, tmp_path / "new")
    assert sorted(path.name for path in paths) == [
        "arrivals.png",
        "block-sizes.png",
        "copy-on-write.png",
        "fragmentation.png",
        "memory.png",
        "slots.png",
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5_000


@pytest.mark.ci
def test_drawing_leaves_nothing_in_the_home_folder(figures: Figures, tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    (temporary := tmp_path / "temporary").mkdir()
    (computed := tmp_path / "figures.pickle").write_bytes(pickle.dumps(figures))
    code = (
        "import pickle, sys; from pathlib import Path; from blockyard.deploy.figures.plots import draw_figures;"
        "draw_figures(pickle.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MPL", "XDG_"))}
    subprocess.run(
        [sys.executable, "-c", code, str(computed), str(tmp_path / "pictures")],
        check=True,
        env=kept | {"HOME": str(home), "TMPDIR": str(temporary)},
    )
    assert len(list((tmp_path / "pictures").iterdir())) == 6
    assert list(home.iterdir()) == list(temporary.iterdir()) == []


def test_computing_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, blockyard.deploy.figures.figures, blockyard.deploy.figures.plots;"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_contiguous_memory_takes_the_first_piece_that_is_long_enough() -> None:
    memory = ContiguousMemory(100)
    assert [memory.reserve(count) for count in (30, 20, 40)] == [0, 30, 50]
    memory.release(0, 30)
    assert (memory.total_free, memory.largest_free) == (40, 30)
    assert memory.reserve(35) is None
    assert memory.reserve(10) == 0
    memory.release(30, 20)
    assert memory.largest_free == 40


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_contiguous_memory_neither_loses_nor_doubles_slots(actions: list[tuple[bool, int]]) -> None:
    memory, held = ContiguousMemory(200), list[tuple[int, int]]()
    for reserves, count in actions:
        if reserves and (start := memory.reserve(count)) is not None:
            held.append((start, count))
        elif not reserves and held:
            memory.release(*held.pop(count % len(held)))
        slots = [slot for start, length in held for slot in range(start, start + length)]
        assert len(slots) == len(set(slots)) == memory.size - memory.total_free
    for piece in held:
        memory.release(*piece)
    assert memory.largest_free == memory.size
