"""SECURITY.md names a test for each promise, and each test exists. Also holds the promises' tests that fit nowhere
else."""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from blockyard.router.admission.auth import TokenTable
from blockyard.router.admission.token_entries import new_token, parse_tokens
from blockyard.router.calls.gate import CallGate
from blockyard.router.errors import Unauthenticated
from blockyard.router.server import RouterServer

from tests.unit.router.rig import config

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(?P<path>(?:tests/[\w/]+/)?(?:test_\w+\.py)?)(?:::(?P<test>\w+))?`")
A_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
PROMISING = (
    "By default",
    "Who is trusted with what",
    "The session port",
    "Redis",
    "Audit",
    "Dependencies",
)
"""Sections with promises, beside the table of threats. "What is not protected" takes promises back."""


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", DOCUMENT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def proofs(text: str) -> Iterator[tuple[Path, str | None]]:
    """Return the files and folders of tests that a text names. A bare file is one about security."""
    for match in NAMED.finditer(text):
        if path := match["path"]:
            bare = [*(ROOT / "tests").glob(f"*/security/{path}")] if "/" not in path else []
            yield bare[0] if bare else ROOT / path, match["test"]


def names_in(path: Path) -> set[str]:
    files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    return {name for file in files for name in A_TEST.findall(file.read_text(encoding="utf-8"))}


def threats() -> list[list[str]]:
    rows = [line for line in sections()["Threats"].splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("threat", threats(), ids=lambda threat: threat[0][:60])
def test_each_threat_names_a_proof_that_is_there(threat: list[str]) -> None:
    _, _, proof = threat
    assert list(proofs(proof)), f"{proof!r} names no test"


@pytest.mark.parametrize("section", PROMISING)
def test_each_section_that_promises_names_its_proofs(section: str) -> None:
    assert list(proofs(sections()[section]))


def test_each_test_that_the_document_names_is_there() -> None:
    missing = [
        f"{path.relative_to(ROOT)}::{test or '*'}"
        for path, test in proofs(DOCUMENT)
        if not path.exists() or not names_in(path) or (test is not None and test not in names_in(path))
    ]
    assert missing == []


def test_a_name_that_leads_nowhere_would_be_found() -> None:
    text = "`test_auth.py`, `tests/unit/router/test_tokenizing.py::test_x`, `tests/unit/hostile/`, `/health`, `tests`"
    found = [(str(path.relative_to(ROOT)), test) for path, test in proofs(text)]
    assert found == [
        ("tests/unit/security/test_auth.py", None),
        ("tests/unit/router/test_tokenizing.py", "test_x"),
        ("tests/unit/hostile", None),
    ]
    assert "test_x" not in names_in(ROOT / "tests/unit/router/test_tokenizing.py")
    assert names_in(ROOT / "tests/nowhere") == set()


def found_under(table: TokenTable) -> set[bytes]:
    """Return the keys of the table's dictionaries."""
    held = [value for value in vars(table).values() if isinstance(value, dict)]
    return {key for known in held for key in known if isinstance(key, bytes)}


def test_tokens_are_found_under_a_hash_that_nobody_outside_can_compute() -> None:
    token, made = new_token("ann", "user")
    tables = [parse_tokens(json.dumps([made])) for _ in range(2)]
    assert all(table.find(token) is not None for table in tables)
    keys = [found_under(table) for table in tables]
    assert all(len(known) == 1 for known in keys)
    assert not keys[0] & keys[1], "two processes find it under the same"
    assert sha256(token.encode()).digest() not in keys[0] | keys[1]


@pytest.mark.parametrize(("host", "is_told"), [("0.0.0.0", True), ("127.0.0.1", False)])
async def test_a_router_that_is_open_beyond_loopback_says_so(
    host: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = RouterServer(config(host=host))
    await server.start()
    await server.stop(grace_seconds=0)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("no auth file" in line for line in told) is is_told
    assert any("no TLS" in line for line in told) is is_told


def test_calls_without_a_known_token_are_counted_not_told_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens = parse_tokens(json.dumps([new_token("ann", "user")[1]]))
    gate = CallGate(lambda: tokens)
    for _ in range(1000):
        with pytest.raises(Unauthenticated):
            gate.admit("/blockyard.v1.InferenceService/Generate", (("authorization", "bearer by-nobody"),))
    told = [record.getMessage() for record in caplog.records if record.name == "blockyard.audit"]
    assert told == ["1 calls came without a known token"]
    assert "by-nobody" not in caplog.text
