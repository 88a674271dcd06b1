"""Settings for every test.

- Without a GPU Triton interprets its kernels, which must be set before anything imports Triton.
- Threads spin only briefly on a machine crowded with processes.
- Crossed parameters: `make test-all` alone takes all of the combinations.
- `quick_cases` leaves all cases but the first to CI.
- Quick tests that cost much are named at the end of a run: CONTRIBUTING.md says how a test gets the mark `ci`.
- `measured` takes the figures of a row of the fault matrix.
"""

import os
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("hypothesis"):  # A bare machine with a GPU runs the kernels' tests without it.
    from hypothesis import settings

    # A machine crowded with processes may stop for a second in the middle of an example. CI tries the same examples
    # every time, so it judges the change alone. Elsewhere new ones are looked for, by `make test` few of them
    # (`--hypothesis-profile quick`). Tests that say how many they try follow by `properties.examples`.
    settings.register_profile("crowded", deadline=None, derandomize="CI" in os.environ)
    settings.register_profile("quick", settings.get_profile("crowded"), max_examples=20)
    settings.load_profile("crowded")
# Dozens of processes share the cores here, computing workers among them. A thread that spins keeps another from its
# work.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

TESTS = Path(__file__).parent
QUICK_FILES = pytest.StashKey[frozenset[str]]()
NOT_QUICK = ("ci", "slow", "slow_fault")
MOST_SECONDS = 4.0
"""Most that the body of a quick test may take on a quiet machine."""
MOST_CPU_SECONDS = 1.0
"""Most CPU time of it in this process, in all threads."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests. Where parameters are crossed, CI has each value at least once, and `make test-all` every
    combination. A module of cluster tests runs in one process, and so does everything with Ray."""
    functions: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        _mark_repeated_values(cases)
        _mark_later_cases(cases)
    for item in items:
        if item.get_closest_marker("cluster"):
            shares_ray = item.get_closest_marker("ray") is not None
            item.add_marker(pytest.mark.xdist_group("ray" if shares_ray else item.nodeid.partition("::")[0]))
    config.stash[QUICK_FILES] = frozenset(
        item.path.relative_to(TESTS).as_posix()
        for item in items
        if item.path.is_relative_to(TESTS) and not any(map(item.get_closest_marker, NOT_QUICK))
    )


def _mark_repeated_values(cases: Sequence[pytest.Function]) -> None:
    seen: set[tuple[str, str | int]] = set()
    for case in cases:
        values = {(name, _same(value)) for name, value in case.callspec.params.items()}
        if values <= seen:
            case.add_marker(pytest.mark.slow)
        seen |= values


def _mark_later_cases(cases: Sequence[pytest.Function]) -> None:
    mark = cases[0].get_closest_marker("quick_cases")
    if mark is not None:
        (count,) = mark.args
        for case in [case for case in cases if case.get_closest_marker("slow") is None][count:]:
            case.add_marker(pytest.mark.ci)


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
    """Name the quick tests that cost more than a quick test may. Those of whole clusters may."""
    costs: list[tuple[float, float, str]] = []
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and not any(name in report.keywords for name in (*NOT_QUICK, "cluster")):
            cpu_seconds = dict(report.user_properties).get("cpu_seconds", 0.0)
            if cpu_seconds > MOST_CPU_SECONDS or report.duration > MOST_SECONDS:
                costs.append((cpu_seconds, report.duration, report.nodeid))
    if costs:
        terminalreporter.section("quick tests that cost much: see CONTRIBUTING.md, How long the tests take")
    for cpu_seconds, seconds, name in sorted(costs, reverse=True)[:20]:
        terminalreporter.write_line(f"{cpu_seconds:5.1f} s of CPU, {seconds:5.1f} s in all: {name}")


@pytest.fixture
def quick_files(pytestconfig: pytest.Config) -> frozenset[str]:
    """Paths below tests/ of the files that have a quick test. Skip where only some of the tests are collected."""
    if {Path(argument).resolve() for argument in pytestconfig.args} != {TESTS}:
        pytest.skip("not all of tests/ is collected")
    return pytestconfig.stash[QUICK_FILES]


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Figures of a row that the report shows: `failed`, `migrated` (requests), `recovery_seconds`, `note`."""
    figures: dict[str, Any] = {}
    request.node.user_properties.append(("measured", figures))
    return figures
