"""`--slice COMMIT`: the part of the nightly tests that CI runs, chosen by the hash of a commit.

`make nightly` writes to seconds.json how long each test took. A slice takes files in an order that the commit decides,
until their seconds add up to `SLICE_SECONDS`. A test that was never measured is in no slice.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

SLICE_SECONDS = 180.0
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
    seconds: dict[str, float] = json.loads(SECONDS.read_text(encoding="utf-8"))
    by_part: dict[str, float] = defaultdict(float)
    for name in seconds.keys() & {item.nodeid for item in items}:
        by_part[part_of(name, seconds)] += seconds[name]
    parts = set(slice_of(by_part, commit))
    chosen = {name for name in seconds if part_of(name, seconds) in parts}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def part_of(name: str, seconds: dict[str, float]) -> str:
    """Return the file of a test, whose tests share what they start, or the test if its file fits in no slice."""
    file = name.partition("::")[0]
    in_all = sum(lasted for other, lasted in seconds.items() if other.partition("::")[0] == file)
    return file if in_all <= SLICE_SECONDS else name


def slice_of(seconds: dict[str, float], commit: str, most_seconds: float = SLICE_SECONDS) -> Iterator[str]:
    """Yield the parts of the tests that together last at most `most_seconds`, by the order of their hashes with the
    commit's."""
    left = most_seconds
    for name in sorted(seconds, key=lambda name: sha256(f"{commit} {name}".encode()).digest()):
        if seconds[name] <= left:
            left -= seconds[name]
            yield name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--write-seconds", False):
        known = json.loads(SECONDS.read_text(encoding="utf-8"))
        lasted = dict(sorted({**known, **dict(_lasted(terminalreporter))}.items()))
        SECONDS.write_text(f"{json.dumps(lasted, indent=1)}\n", encoding="utf-8")


def _lasted(reporter: pytest.TerminalReporter) -> Iterable[tuple[str, float]]:
    """Return how long each test that passed took, with what it set up and took down."""
    lasted: dict[str, float] = defaultdict(float)
    passed = {report.nodeid for report in reporter.getreports("passed") if report.when == "call"}
    for report in (*reporter.getreports("passed"), *reporter.getreports("")):
        if report.nodeid in passed:
            lasted[report.nodeid] += report.duration
    return [(name, round(seconds, 1)) for name, seconds in lasted.items()]
