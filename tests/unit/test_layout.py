"""The tree: arrows between folders point down, folders stay small, and each says what it owns.

A folder is one room. Modules in the root of a package (`router/config.py`) count one by one: some lie below all
folders, some above.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("proto", "kernels", "worker", "router", "deploy", "simulation")
MAY_IMPORT = {
    "proto": set[str](),
    "kernels": set[str](),
    "worker": {"proto", "kernels"},
    "router": {"proto"},
    "deploy": {"proto", "kernels", "worker", "router"},
    "simulation": {"proto", "worker", "router"},
}
MAX_FILES = 14
"""Modules in a folder, besides `__init__.py`."""
SOURCES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.parent.name != "v1"
}
FOLDERS = sorted({name.rpartition("/")[0] for name in SOURCES})


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports, lazily or for types alone too, as paths without a suffix."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(base), names=names):
                for name in (f"{base}.{one.name}" for one in names):
                    whole, parent = (
                        text.removeprefix("blockyard.").replace(".", "/") for text in (name, base)
                    )
                    yield whole if whole in SOURCES else parent
            case ast.Import(names=names):
                yield from (one.name.removeprefix("blockyard.").replace(".", "/") for one in names)


def room(module: str) -> str:
    """Return the folder of a module, or the module itself where it lies in the root of a package."""
    if f"{module}/__init__" in SOURCES:
        return module
    folder = module.removesuffix("/__init__").rpartition("/")[0]
    return module if folder in PACKAGES else folder


@cache
def arrows() -> dict[str, set[str]]:
    found = defaultdict[str, set[str]](set)
    for module, path in SOURCES.items():
        for other in imported(path):
            if (
                other.split("/")[0] in (*PACKAGES, "bench", "tests")
                and not other.startswith("proto/v1")
                and room(other) != room(module)
            ):
                found[room(module)].add(room(other))
    return found


def test_no_circle_of_folders() -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(f"folders import one another: {' -> '.join(reversed(error.args[1]))}")


def test_packages_import_downwards_alone() -> None:
    upwards = [
        (source, target)
        for source, targets in arrows().items()
        for target in targets
        if target.split("/")[0] not in {*MAY_IMPORT[source.split("/")[0]], source.split("/")[0]}
    ]
    assert not upwards


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_small_and_says_what_it_owns(folder: str) -> None:
    modules = Counter(name.rpartition("/")[0] for name in SOURCES if not name.endswith("/__init__"))
    assert modules[folder] <= MAX_FILES
    assert ast.get_docstring(ast.parse(SOURCES[f"{folder}/__init__"].read_bytes())), f"{folder} says nothing"
