"""Settings for every test.

- Without a GPU Triton interprets its kernels, which must be set before anything imports Triton.
- Threads spin only briefly on a machine crowded with processes.
- Crossed parameters: the quick run takes some of the cases.
- `measured` takes the figures of a row of the fault matrix.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("hypothesis"):  # A bare machine with a GPU runs the kernels' tests without it.
    from hypothesis import settings

    # A machine crowded with processes may stop for a second in the middle of an example. CI tries the same examples
    # every time, so it judges the change alone. `make test` looks for new ones.
    settings.register_profile("crowded", deadline=None, derandomize="CI" in os.environ)
    settings.load_profile("crowded")
# Dozens of processes share the cores here, computing workers among them. A thread that spins keeps another from its
# work.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests. Where parameters are crossed, the quick run has each value at least once, and `make test-all` every
    combination. A module of cluster tests runs in one process, and so does everything with Ray."""
    functions: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        _mark_repeated_values(cases)
    for item in items:
        if item.get_closest_marker("cluster"):
            shares_ray = item.get_closest_marker("ray") is not None
            item.add_marker(pytest.mark.xdist_group("ray" if shares_ray else item.nodeid.partition("::")[0]))


def _mark_repeated_values(cases: Sequence[pytest.Function]) -> None:
    seen: set[tuple[str, str | int]] = set()
    for case in cases:
        values = {(name, _same(value)) for name, value in case.callspec.params.items()}
        if values <= seen:
            case.add_marker(pytest.mark.slow)
        seen |= values


def _same(value: object) -> str | int:
    """Return a key that is equal for equal plain values, and otherwise for the same object: the text of some takes 60
    MB."""
    is_plain = value is None or isinstance(value, str | bytes | int | float)
    return repr(value) if is_plain else id(value)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Figures of a row that the report shows: `failed`, `migrated` (requests), `recovery_seconds`, `note`."""
    figures: dict[str, Any] = {}
    request.node.user_properties.append(("measured", figures))
    return figures
