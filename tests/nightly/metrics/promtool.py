"""Debian's `prometheus` and `promtool`, if the machine has them: they check rules, expressions and series."""

import subprocess
from pathlib import Path

import pytest

from tests.programs import are_required, missing

GRAFANA = Path(__file__).parents[3] / "deploy" / "grafana"
ALERTS = GRAFANA / "alerts.yaml"
SECONDS = 120.0
MISSING = missing("prometheus", "promtool")

needs_prometheus = pytest.mark.skipif(
    bool(MISSING) and not are_required(),
    reason=f"{' and '.join(MISSING)} not on the PATH (Debian: apt-get install prometheus)",
)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=SECONDS)
