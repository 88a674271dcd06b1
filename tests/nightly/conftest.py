"""`--slice COMMIT`: the part of the nightly tests that CI runs, chosen by the hash of a commit.

`make nightly` writes to seconds.json how long each test took. A slice takes tests in an order that the commit decides,
until their seconds add up to `SLICE_SECONDS`.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

SLICE_SECONDS = 180.0
UNKNOWN_SECONDS = 20.0
"""A test lasts so long, as far as we know, until `make nightly` has measured it."""
SECONDS = Path(__file__).with_name("seconds.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice", metavar="COMMIT", help="run three minutes of tests/nightly, chosen by a commit's hash"
    )
    parser.addoption(
        "--write-seconds", action="store_true", help=f"keep how long each test took in {SECONDS.name}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commit = config.getoption("--slice", None)
    if commit is None:
        return
    seconds: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    chosen = set(slice_of({item.nodeid: seconds.get(item.nodeid, UNKNOWN_SECONDS) for item in items}, commit))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def slice_of(seconds: dict[str, float], commit: str, most_seconds: float = SLICE_SECONDS) -> Iterator[str]:
    """Yield the names of tests that together last at most `most_seconds`, by the order of their hashes with the
    commit's."""
    left = most_seconds
    for name in sorted(seconds, key=lambda name: sha256(f"{commit} {name}".encode()).digest()):
        if seconds[name] <= left:
            left -= seconds[name]
            yield name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--write-seconds", False):
        SECONDS.write_text(f"{json.dumps(dict(_lasted(terminalreporter)), indent=1)}\n")


def _lasted(reporter: pytest.TerminalReporter) -> Iterable[tuple[str, float]]:
    reports = [report for word in ("passed", "failed", "error") for report in reporter.getreports(word)]
    names = sorted({report.nodeid for report in reports if report.nodeid.startswith("tests/nightly/")})
    return [(name, round(sum(r.duration for r in reports if r.nodeid == name), 1)) for name in names]
