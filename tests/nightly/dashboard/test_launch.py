"""Our launcher of Ray's dashboard, with a script in its place that prints its environment."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.dashboard import launch
from blockyard.deploy.dashboard.metrics_tab import GRAFANA_VARIABLE, STAND_IN_PATH, TAB_VARIABLE

ARGUMENTS = ["--host=127.0.0.1", "--port=8299", "--temp-dir=/t"]
ASKED = {TAB_VARIABLE: "1"}


@pytest.mark.parametrize(
    ("environment", "arguments", "has_tab", "told"),
    [
        (ASKED, ARGUMENTS, True, ""),
        ({}, ARGUMENTS, False, ""),
        (
            {**ASKED, GRAFANA_VARIABLE: "http://grafana:3000"},
            ARGUMENTS,
            False,
            "the Metrics tab stays as it is",
        ),
        (ASKED, [], False, "the Metrics tab stays as it is"),
    ],
)
def test_the_dashboard_alone_is_told_and_starts_whatever_is_wrong(
    tmp_path: Path, environment: dict[str, str], arguments: list[str], has_tab: bool, told: str
) -> None:
    script = tmp_path / "dashboard.py"
    script.write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n", encoding="utf-8")
    command = [sys.executable, str(launch.__file__), str(script), *arguments]
    ran = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=120
    )
    seen: dict[str, Any] = json.loads(ran.stdout)
    assert (STAND_IN_PATH in seen.get(GRAFANA_VARIABLE, "")) == has_tab
    assert told in ran.stderr
    assert told or "blockyard:" not in ran.stderr
