"""The command `figures` computes, compares and draws its figures; and the contiguous memory that it simulates."""

import os
import pickle
from pathlib import Path

import pytest
from blockyard.deploy.figures.figures import Comparison, Figures, compute_figures, figures_table
from blockyard.deploy.figures.memory import ContiguousMemory
from blockyard.deploy.figures.plots import draw_figures
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.deploy.rig import document, printed

from .rig import python


@pytest.fixture(scope="module")
def figures() -> Figures:
    return compute_figures()


def test_the_command_prints_every_figure_as_json(figures: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only to save seconds.
    monkeypatch.setattr("blockyard.deploy.figures.figures.compute_figures", lambda: figures)
    told = document("figures")
    assert told == figures.as_dict()
    parts = "slots memory fragmentation arrivals copy_on_write block_sizes comparisons"
    assert list(told) == parts.split()
    assert [size["block_size"] for size in told["block_sizes"]] == [16, 32, 64, 128]
    assert set(told["arrivals"]["peak_running"]) == {"contiguous", "paged"}


def test_the_table_shows_both_numbers_and_says_how_they_differ(figures: Figures) -> None:
    lines = printed(figures_table(figures)).splitlines()

    def line(part: str) -> str:
        (found,) = (line for line in lines if part in line)
        return found

    assert (line("static batching").count("46.9%"), "differs" in line("static batching")) == (2, False)
    assert "differs: below the textbook" in line("as the scheduler admits")
    assert "differs: above the textbook" in line("paged memory in use")


@pytest.mark.parametrize(("ours", "agrees"), [(0.4688, True), (0.4680, False)])
def test_a_figure_agrees_where_it_prints_like_the_textbook(ours: float, agrees: bool) -> None:
    comparison = Comparison(group="g", name="n", value=ours, unit="%", textbook=0.469)
    assert comparison.agrees is agrees


def test_each_figure_becomes_a_picture_and_drawing_leaves_nothing_in_the_home_folder(
    figures: Figures, tmp_path: Path
) -> None:
    (home := tmp_path / "home").mkdir()
    (temporary := tmp_path / "temporary").mkdir()
    (computed := tmp_path / "figures.pickle").write_bytes(pickle.dumps(figures))
    code = (
        "import pickle, sys; from pathlib import Path; from blockyard.deploy.figures.plots import draw_figures;"
        "draw_figures(pickle.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MPL", "XDG_"))}
    own = kept | {"HOME": str(home), "TMPDIR": str(temporary)}
    assert python(code, str(computed), str(tmp_path / "pictures"), env=own).returncode == 0
    assert list(home.iterdir()) == list(temporary.iterdir()) == []
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    names = ("arrivals", "block-sizes", "copy-on-write", "fragmentation", "memory", "slots")
    assert drawn.keys() == {f"{name}.png" for name in names}
    for content in drawn.values():
        assert (content[:4], len(content) > 5_000) == (b"\x89PNG", True)
    assert len(draw_figures(figures, tmp_path / "new")) == 6


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
