"""The table of mutants fits the product and the tests of today, and a verdict is said only where there is one."""

from pathlib import Path

import pytest

from .matrix import MATRIX
from .mutant import Mutant
from .mutant_table import MUTANTS, NOT_TRIED
from .mutants import ROOT, Verdict, broken, chosen, table, verdict_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.row}-{mutant.name}")
def test_a_mutant_fits_the_product_and_its_test_is_of_its_row(mutant: Mutant) -> None:
    for edit in mutant.edits:
        text = (ROOT / edit.file).read_text()
        assert text.count(edit.right) == 1, f"{edit.file}: {edit.right!r}"
        compile(text.replace(edit.right, edit.wrong), edit.file, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        before, found, _ = (ROOT / file).read_text().partition(f"def {name.partition('[')[0]}(")
        assert found, test
        marks = before.rpartition("\n\n")[2]
        assert f"fault({mutant.row})" in marks, f"{test} is not of row {mutant.row}"


def test_names_of_mutants_are_unique_within_a_row_and_rows_are_those_of_the_matrix() -> None:
    names = [(mutant.row, mutant.name) for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert {row for row, _ in names} | NOT_TRIED.keys() <= {fault.number for fault in MATRIX}
    assert not {row for row, _ in names} & NOT_TRIED.keys()


def test_the_tree_is_broken_for_the_context_alone(tmp_path: Path) -> None:
    mutant = MUTANTS[0]
    (edit,) = mutant.edits
    path = tmp_path / edit.file
    path.parent.mkdir(parents=True)
    path.write_text(f"a\n{edit.right}b\n")
    with broken(tmp_path, mutant):
        assert edit.wrong in path.read_text()
    assert path.read_text() == f"a\n{edit.right}b\n"


def test_a_mutant_whose_text_is_gone_is_refused(tmp_path: Path) -> None:
    (edit,) = MUTANTS[0].edits
    (tmp_path / edit.file).parent.mkdir(parents=True)
    (tmp_path / edit.file).write_text("rewritten since\n")
    with pytest.raises(ValueError, match="exactly once"), broken(tmp_path, MUTANTS[0]):
        pass


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ("PASSED tests/a.py::b\n", ("survived", "")),
        ("FAILED tests/a.py::b - AssertionError: assert 1\n", ("killed", "AssertionError: assert 1")),
        ("ERROR tests/a.py::b - no start\n", ("did not come to its test", "no start")),
        ("SKIPPED [1] tests/a.py:3: no compiler\n", ("skipped by its test", "")),
        ("ERROR: not found: tests/a.py::b\n", ("did not come to its test", "")),
    ],
)
def test_only_a_failed_test_kills(output: str, verdict: tuple[str, str]) -> None:
    assert verdict_of(output) == verdict


def test_rows_that_were_not_tried_now_keep_their_lines() -> None:
    old, new = MUTANTS[:2]
    kept = f"| {old.row} | {old.name} | t | killed | 1 | long ago | x |"
    earlier = f"{kept}\n| 999 | gone | t | killed | 1 | long ago | x |\n"
    lines = table([Verdict(mutant=new, word="killed", seconds=2.0, tried="now")], before=earlier)
    assert kept in lines, "with the day on which it was tried"
    assert [line for line in lines if new.name in line and "| killed | 2 | now |" in line]
    assert not any("gone" in line for line in lines)
    assert sum("not tried" in line for line in lines) == len(NOT_TRIED)


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(ValueError, match="999"):
        chosen([999])
