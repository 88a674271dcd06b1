"""Each check of `make check` can fail: a fault is planted in a copy of the tree, and the check's own command names it.

The commands are those of the Makefile. A check without a fault here fails the first test.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.prose import checked_paths

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
Change = Callable[[str], str]


def adds(text: str) -> Change:
    return lambda whole: f"{whole}{text}"


def pins(version: str) -> Change:
    return lambda lock: re.sub(r"^aiohttp==\S+", f"aiohttp=={version}", lock, flags=re.MULTILINE)


UNTYPED = "\n\ndef planted(value):\n    return value\n"
ODD_LAYOUT = "planted = {  'a' : 1 }\n"
LONG = " ".join(["Planted", *["word"] * 40]) + "."
FAULTS: dict[str, list[tuple[str, Change, str]]] = {
    "ruff format --check .": [("proto/naming/pooling.py", adds(ODD_LAYOUT), "pooling.py")],
    "ruff check .": [("tests/unit/test_layout.py", adds("import planted\n"), "F401")],
    "mypy": [
        ("supply_chain/parts.py", adds(UNTYPED), "parts.py:.*missing a type annotation"),
        ("supply_chain/sbom.py", adds('\nplanted: int = "1"\n'), "sbom.py:.*Incompatible types"),
    ],
    "python -m proto.generate --check": [
        ("proto/v1/admin.proto", adds("\nmessage Planted {}\n"), "admin_pb2.py, admin_pb2.pyi"),
        ("proto/v1/session_pb2.py", adds("planted = 1\n"), "session_pb2.py"),
        ("proto/v1/planted.proto", adds('syntax = "proto3";\n'), "planted.proto"),
        ("proto/v1/gone_pb2.py", adds("planted = 1\n"), "gone_pb2.py"),
    ],
    "python -m tools.api_reference --check": [
        ("docs/api.md", adds("planted\n"), "docs/api.md is out of date")
    ],
    "python -m tools.cli_reference docs/cli.md --check": [
        ("docs/cli.md", adds("planted\n"), "docs/cli.md is out of date")
    ],
    "python -m tools.prose": [
        ("docs/tuning.md", adds(f"\n{LONG}\n"), "docs/tuning.md:.*a sentence of 41 words"),
        ("tools/quiet_run.py", adds(f"# {LONG}\n"), "tools/quiet_run.py:.*a sentence of 41 words"),
        ("worker/planted.py", adds('"""Of planted."""\n'), "worker/planted.py:1: the docstring begins"),
    ],
    "python -m tools.blocking_client --check": [
        ("router/client/aio.py", adds("\n\nPLANTED = 1\n"), "sync.py is out of date")
    ],
    "python -m supply_chain.sbom --check": [
        ("requirements.lock", pins("3.9.0"), "sbom.cdx.json is out of date")
    ],
    "python -m supply_chain.advisories": [
        ("requirements.lock", pins("3.9.0"), r"(GHSA|CVE)-\S+: .*aiohttp.*3\.9\.0")
    ],
    "mkdocs build": [
        ("docs/glossary.md", adds("\n[planted](gateway.md#planted)\n"), "anchor '#planted'"),
        ("docs/tuning.md", adds("\n```sh planted\necho\n```\n"), "docs/tuning.md' has .* fences, but"),
        ("docs/client.md", adds("\n[planted](planted.md)\n"), "planted.md"),
    ],
}
"""Faults by check: a file, the change that is planted there, and a pattern of the message that must follow."""


def commands() -> list[str]:
    """Return the commands of `make check`."""
    make = ("make", "--no-print-directory", "-n", "-o", "install", "-o", ".typing/blockyard", "check")
    made = subprocess.run([*make, f"BIN={BIN}"], cwd=ROOT, capture_output=True, text=True, check=True)
    return made.stdout.splitlines()


def named(command: str) -> str:
    """Return a command without its variables and the folder of its program."""
    return re.sub(r"^(\w+=\S* )*", "", command).removeprefix(f"{BIN}/")


def test_each_check_has_a_fault_to_find() -> None:
    assert [named(command) for command in commands()] == list(FAULTS)


def test_types_are_checked_in_every_folder_but_tests_and_benchmarks() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    folders = {name.partition("/")[0] for name in tracked} - {"tests", "bench", "examples", "docs"}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["packages"]
    assert {name.removeprefix("blockyard.") for name in packages} == folders


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree as git sees it, in a repository of its own."""
    folder = tmp_path_factory.mktemp("checks") / "tree"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    (folder / ".typing").mkdir()
    (folder / ".typing" / "blockyard").symlink_to("..")
    return folder


@pytest.mark.parametrize("check", FAULTS)
def test_a_check_finds_its_fault(check: str, copy: Path) -> None:
    (command,) = (command for command in commands() if named(command) == check)
    if check == "mypy":
        command += " -p supply_chain"  # the same settings for one package: all of them take minutes
    before: dict[Path, bytes | None] = {}
    try:
        for name, change, _ in FAULTS[check]:
            path = copy / name
            before[path] = path.read_bytes() if path.exists() else None
            whole = path.read_text(encoding="utf-8") if path.exists() else ""
            path.write_text(change(whole), encoding="utf-8")
            assert change(whole) != whole, "no fault was planted"
        result = subprocess.run(
            ["bash", "-c", command], cwd=copy, capture_output=True, text=True, timeout=250
        )
    finally:
        for path, content in before.items():
            path.unlink() if content is None else path.write_bytes(content)
    said = result.stdout + result.stderr
    assert result.returncode != 0, said
    assert [told for *_, told in FAULTS[check] if not re.search(told, said)] == [], said


def test_sentences_are_read_everywhere_but_in_reports() -> None:
    assert not [path for path in checked_paths() if path.startswith("bench/reports/")]
    assert {"README.md", "worker/engine.py", "tests/unit/docs/test_prose.py"} <= set(checked_paths())
