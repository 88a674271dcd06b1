"""The product, broken on purpose in one way, which the tests of a row of the fault matrix must find.

mutants_*.py lists the mutants as data; mutants.py runs them. Each is a mistake that a programmer could make: a
forgotten release, a limit off by one, a missing timeout, an unforeseen error.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

TESTS = Path(__file__).parents[2]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of one function's syntax tree, so that neither moved files nor other line breaks affect it."""

    where: str
    """`PACKAGE:Class.method`, a function, or a constant's name. It occurs once in the package."""
    right: str
    """An expression, or consecutive statements. It occurs once in the function."""
    wrong: str
    """Replacement code."""

    def file(self, tree: Path) -> Path:
        """Return the file that defines it. Raises ValueError unless exactly one does."""
        package, _, name = self.where.partition(":")
        found = [path for path in sorted((tree / package).rglob("*.py")) if name in _names(path)]
        if len(found) != 1:
            raise ValueError(f"{self.where} is defined in {len(found)} files of {tree}")
        return found[0]

    def apply(self, source: str) -> str:
        """Return the module's source with the change. Raises ValueError where `right` does not occur once."""
        module = ast.parse(source)
        scopes = [node for name, node in _definitions(module) if name == self.where.partition(":")[2]]
        change = _Replacement(self.right, self.wrong)
        for scope in scopes:
            change.visit(scope)
        if len(scopes) != 1 or change.num_made != 1:
            raise ValueError(f"{self.where} has {change.num_made} times: {self.right!r}")
        return ast.unparse(ast.fix_missing_locations(module))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    row: int
    name: str
    """Description of the defect."""
    edits: tuple[Edit, ...]
    """Changes to make. There are several where the product is guarded twice, or where the mistake needs two places."""
    tests: tuple[str, ...]
    """Test ids, of which at least one must fail."""


def mutant(row: int, name: str, test: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(
        row=row,
        name=name,
        edits=tuple(Edit(where=where, right=right, wrong=wrong) for where, right, wrong in edits),
        tests=(_found(test if "/" in test else f"faults/test_{test}"),),
    )


def _found(test: str) -> str:
    """Return the test's id, from its path below tests/unit, tests/system or tests/nightly."""
    path, *name = test.split("::")
    (file,) = TESTS.glob(f"*/{path}")
    return "::".join([str(file.relative_to(TESTS.parent)), *name])


class _Replacement(ast.NodeTransformer):
    """Replaces every occurrence of a piece of code, and counts them."""

    def __init__(self, right: str, wrong: str) -> None:
        self._right, self._wrong = ast.parse(dedent(right)).body, ast.parse(dedent(wrong)).body
        self.num_made = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if any(node is made for made in self._wrong):
            return node
        match self._right, self._wrong:
            case [ast.Expr(right)], [ast.Expr(wrong)] if _is_same([node], [right]):
                self.num_made += 1
                return wrong
        for _, statements in ast.iter_fields(node):
            if isinstance(statements, list):
                self._replace_run(statements)
        return self.generic_visit(node)

    def _replace_run(self, statements: list[Any]) -> None:
        length, start = len(self._right), 0
        while start + length <= len(statements):
            if _is_same(statements[start : start + length], self._right):
                statements[start : start + length] = made = self._wrong or [ast.Pass()]
                start += len(made)
                self.num_made += 1
            else:
                start += 1


def _is_same(some: Sequence[ast.AST], others: Sequence[ast.AST]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(type(one) is type(other) and ast.dump(one) == ast.dump(other) for one, other in pairs)


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield f"{prefix}{child.name}", child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif not prefix and isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            yield child.targets[0].id, child
        else:
            yield from _definitions(child, prefix)


@cache
def _names(path: Path) -> frozenset[str]:
    return frozenset(name for name, _ in _definitions(ast.parse(path.read_text())))
