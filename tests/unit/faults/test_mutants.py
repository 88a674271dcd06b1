"""The table of mutants fits the product and tests of today, and a run without a verdict reports none."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.nightly.faults.matrix import MATRIX
from tests.nightly.faults.mutant import Edit, Mutant
from tests.nightly.faults.mutant_table import MUTANTS, NOT_TRIED
from tests.nightly.faults.mutants import ROOT, Verdict, broken, chosen, table, verdict_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.row}-{mutant.name}")
def test_a_mutant_fits_the_product_and_its_test_is_of_its_row(mutant: Mutant) -> None:
    for edit in mutant.edits:
        path = edit.file(ROOT)
        compile(edit.apply(path.read_text()), str(path), "exec")
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


SOURCE = """
LIMIT = 2

class Queue:
    def take(self):
        # Why it waits.
        if self.items > LIMIT:
            self.items -= 1
        return (self.items
                + 1)
"""


def written(tree: Path, text: str) -> Path:
    path = tree / "router" / "a_folder" / "queue.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("where", "right", "wrong", "made"),
    [
        ("router:LIMIT", "2", "3", "LIMIT = 3"),
        ("router:Queue.take", "self.items > LIMIT", "False", "if False:"),
        ("router:Queue.take", "self.items + 1", "self.items", "return self.items\n"),
        ("router:Queue.take", "self.items -= 1", "", "if self.items > LIMIT:\n            pass"),
        (
            "router:Queue.take",
            "self.items -= 1",
            "if 1: self.items -= 1",
            "if 1:\n                self.items",
        ),
    ],
)
def test_the_tree_is_broken_for_the_context_alone(
    where: str, right: str, wrong: str, made: str, tmp_path: Path
) -> None:
    path = written(tmp_path, SOURCE)
    mutant = replace(MUTANTS[0], edits=(Edit(where=where, right=right, wrong=wrong),))
    with broken(tmp_path, mutant):
        assert made in f"{path.read_text()}\n"
    assert path.read_text() == SOURCE


@pytest.mark.parametrize(
    ("where", "right", "says"),
    [
        ("router:Queue.take", "self.items", "has 2 times"),
        ("router:Queue.take", "self.gone", "has 0 times"),
        ("router:Queue.gone", "1", "defined in 0 files"),
    ],
)
def test_a_mutant_whose_code_is_gone_or_ambiguous_is_refused(
    where: str, right: str, says: str, tmp_path: Path
) -> None:
    written(tmp_path, SOURCE)
    mutant = replace(MUTANTS[0], edits=(Edit(where=where, right=right, wrong="0"),))
    with pytest.raises(ValueError, match=says), broken(tmp_path, mutant):
        pass


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ("PASSED tests/a.py::b\n", ("survived", "")),
        ("ERROR    blockyard.worker:bisect.py:62 step 3 failed\nPASSED tests/a.py::b\n", ("survived", "")),
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
