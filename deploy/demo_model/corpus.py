"""Corpus of the demo model: the standard library of the running interpreter, read as text.

Owns the choice of files, and how a file becomes documents (plain text) and definitions (functions, methods and classes
with their source). Does not know chats, tokens or models.
"""

from __future__ import annotations

import ast
import importlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Never trained on, so that the loss on them is a loss on unseen code.
HELD_OUT_MODULES = ("heapq", "shlex", "textwrap")

# Tests, vendored code, data tables, and GUI wrappers with similar functions.
_SKIPPED_DIRECTORIES = frozenset(
    {"__pycache__", "encodings", "idlelib", "lib2to3", "msilib", "pydoc_data", "site-packages"}
    | {"dist-packages", "test", "tests", "tkinter", "turtledemo"}
)
_SKIPPED_FILES = frozenset({"entities.py", "turtle.py"})
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

_MIN_DEFINITION_LINES = 3
_MAX_DEFINITION_LINES = 45


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One function, method or class, dedented. `owner` is its module, or for a method its class."""

    kind: Literal["function", "method", "class"]
    name: str
    owner: str
    arguments: str
    summary: str
    docstring: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training data of the demo model. `headers` are the first lines of modules, by module name."""

    documents: tuple[str, ...]
    definitions: tuple[Definition, ...]
    topics: tuple[tuple[str, str], ...]
    headers: dict[str, str]
    held_out: str


def read_corpus() -> Corpus:
    """Read the running interpreter's standard library and language reference, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = {_module_name(path.relative_to(root)): _read(path) for path in _source_files(root)}
    held_out = "\n".join(texts.pop(name) for name in HELD_OUT_MODULES)
    topics = _read_topics()
    return Corpus(
        documents=(*texts.values(), *(text for _, text in topics)),
        definitions=tuple(d for name, text in texts.items() for d in _definitions(name, text)),
        topics=topics,
        headers={name: "\n".join(text.splitlines()[:30]) for name, text in texts.items()},
        held_out=held_out,
    )


def _source_files(root: Path) -> list[Path]:
    def wanted(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return (
            not _SKIPPED_DIRECTORIES.intersection(parts)
            and path.name not in _SKIPPED_FILES
            and not any(part.startswith(_SKIPPED_PREFIXES) for part in parts)
        )

    return sorted(path for path in root.rglob("*.py") if wanted(path))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").expandtabs(8)


def _module_name(relative: Path) -> str:
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


def _read_topics() -> tuple[tuple[str, str], ...]:
    """Return the language reference from pydoc, by topic. `topics` is a plain dict in every CPython."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return tuple(sorted((name, text.strip()) for name, text in topics.items()))


def _definitions(module: str, text: str) -> Iterator[Definition]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _definition("function", node, module, lines)
        elif isinstance(node, ast.ClassDef):
            yield from _definition("class", node, module, lines)
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from _definition("method", member, node.name, lines)


def _definition(
    kind: Literal["function", "method", "class"],
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
    owner: str,
    lines: list[str],
) -> Iterator[Definition]:
    first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = lines[first_line - 1 : node.end_lineno]
    if not _MIN_DEFINITION_LINES <= len(body) <= _MAX_DEFINITION_LINES:
        return
    docstring = ast.get_docstring(node) or ""
    yield Definition(
        kind=kind,
        name=node.name,
        owner=owner,
        arguments="" if isinstance(node, ast.ClassDef) else ast.unparse(node.args),
        summary=" ".join(docstring.split("\n\n")[0].split()),
        docstring=docstring,
        source=textwrap.dedent("\n".join(body)),
    )
