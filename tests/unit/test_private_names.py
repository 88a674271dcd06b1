"""Tests use the product's public names. `private_names.json` lists the files that do not, and may only shrink."""

import ast
import json
from pathlib import Path

TESTS = Path(__file__).parents[1]
LISTED = Path(__file__).with_name("private_names.json")


def num_private(path: Path) -> int:
    """Count the attributes with a leading underscore in a file, except those of `self`, `cls` and dunder names."""
    return sum(
        node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    )


def test_no_file_uses_more_private_names_than_are_listed() -> None:
    found = {path.relative_to(TESTS).as_posix(): num_private(path) for path in TESTS.rglob("*.py")}
    listed = json.loads(LISTED.read_text(encoding="utf-8"))
    assert {path: count for path, count in found.items() if count} == listed, (
        "use a public name; where a count has become smaller, put it into private_names.json"
    )
