"""The product, broken on purpose in one way, which the tests of a row of the fault matrix must find.

Which there are is in mutants_*.py, as data alone; mutants.py tries them. Each is a mistake that somebody could make: a
release that is forgotten, a limit off by one, a time-out that is missing, an error that nobody foresaw. An edit's text
stands exactly once in its file.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    file: str
    right: str
    wrong: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    row: int
    name: str
    """What is broken."""
    edits: tuple[Edit, ...]
    """More than one where the product is guarded twice, or where the mistake needs two places."""
    tests: tuple[str, ...]
    """Ids, of which at least one must fail."""


def mutant(row: int, name: str, test: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(
        row=row,
        name=name,
        edits=tuple(Edit(file=file, right=right, wrong=wrong) for file, right, wrong in edits),
        tests=(f"tests/faults/test_{test}" if "/" not in test else f"tests/{test}",),
    )
