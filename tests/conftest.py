"""Settings for every test.

- Without a GPU Triton interprets its kernels, which must be set before anything imports Triton.
- Threads spin only briefly on a machine crowded with processes.
- `--every-case` runs each combination of parameters, and more random examples: `make nightly` uses it.
- Tests of tests/unit that cost much are named at the end of a run.
- `measured` takes the figures of a row of the fault matrix.
"""

import gc
import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.snapshots import OPTION as UPDATE_SNAPSHOTS
from tests.snapshots import snapshot as snapshot

EVERY_CASE = "--every-case"
if find_spec("hypothesis"):  # A bare machine with a GPU runs the kernels' tests without it.
    from hypothesis import settings

    # A machine crowded with processes may stop for a second in the middle of an example. CI tries the same examples
    # every time, so it judges the change alone. Elsewhere new ones are looked for. Tests that say how many they try
    # follow by `properties.examples`.
    settings.register_profile("nightly", deadline=None, derandomize="CI" in os.environ)
    settings.register_profile("unit", settings.get_profile("nightly"), max_examples=20)
# Dozens of processes share the cores here, computing workers among them. A thread that spins keeps another from its
# work.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

MOST_SECONDS = 4.0
"""Most that the body of a unit test may take on a quiet machine."""
MOST_CPU_SECONDS = 1.0
"""Most CPU time of it in this process, in all threads."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        EVERY_CASE,
        action="store_true",
        help="run every combination of parameters, and five times the random examples",
    )
    parser.addoption(UPDATE_SNAPSHOTS, action="store_true", help="write the stored texts of snapshots anew")


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("hypothesis") and not config.getoption("hypothesis_profile", None):
        settings.load_profile("nightly" if config.getoption(EVERY_CASE) else "unit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out repeated cases. Where parameters are crossed, each value is there at least once."""
    if config.getoption(EVERY_CASE):
        return
    functions: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.nodeid.partition("[")[0]].append(item)
    left_out = {id(case) for cases in functions.values() for case in _repeated_cases(cases)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def pytest_collection_finish() -> None:
    """Let the garbage collector look at the tests' own objects alone: what is imported and collected by now stays."""
    gc.collect()
    gc.freeze()


def _repeated_cases(cases: Sequence[pytest.Function]) -> Iterator[pytest.Function]:
    """Yield the cases without a new value of a parameter, and those after the first ones that `quick_cases` names."""
    mark = cases[0].get_closest_marker("quick_cases")
    count = mark.args[0] if mark is not None else len(cases)
    seen: set[tuple[str, str | int]] = set()
    for case in cases:
        values = {(name, _same(value)) for name, value in case.callspec.params.items()}
        if values <= seen or count <= 0:
            yield case
        else:
            count -= 1
        seen |= values


def _same(value: object) -> str | int:
    """Return a key that is equal for equal plain values, and otherwise for the same object: the text of some takes 60
    MB."""
    is_plain = value is None or isinstance(value, str | bytes | int | float)
    return repr(value) if is_plain else id(value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    begun = time.process_time()
    try:
        yield
    finally:
        item.user_properties.append(("cpu_seconds", time.process_time() - begun))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the unit tests that cost more than one may."""
    costs: list[tuple[float, float, str]] = []
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and report.nodeid.startswith("tests/unit/"):
            cpu_seconds = dict(report.user_properties).get("cpu_seconds", 0.0)
            if cpu_seconds > MOST_CPU_SECONDS or report.duration > MOST_SECONDS:
                costs.append((cpu_seconds, report.duration, report.nodeid))
    if costs:
        terminalreporter.section("unit tests that cost much: see CONTRIBUTING.md, How long the tests take")
    for cpu_seconds, seconds, name in sorted(costs, reverse=True)[:20]:
        terminalreporter.write_line(f"{cpu_seconds:5.1f} s of CPU, {seconds:5.1f} s in all: {name}")


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Figures of a row that the report shows: `failed`, `migrated` (requests), `recovery_seconds`, `note`."""
    figures: dict[str, Any] = {}
    request.node.user_properties.append(("measured", figures))
    return figures
