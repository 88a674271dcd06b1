"""Of several `up` of one name in one home at the same moment one goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blockyard.deploy.machine import state

NUM_COMMANDS = 4
SECONDS = 120.0
TAKE = """
import sys
from blockyard.deploy.lifecycle.cluster import _take_name
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.worker.config import EngineConfig
options = UpOptions(engine=EngineConfig(model="demo"))
print("ready", flush=True)
sys.stdin.readline()
try:
    print(_take_name(options).directory, flush=True)
except ValueError as error:
    print(error, flush=True)
sys.stdin.readline()  # It lives on, as an `up` that starts its cluster.
"""


@pytest.mark.parametrize("is_left_by_a_crash", [False, True])
def test_one_of_several_commands_takes_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_left_by_a_crash: bool
) -> None:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if is_left_by_a_crash:
        state.save(state.ClusterState(cluster="default", model="m", secret="s"))
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", TAKE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        for _ in range(NUM_COMMANDS)
    ]
    try:
        for command in commands:
            assert command.stdout is not None
            assert command.stdout.readline() == "ready\n"
        for command in commands:
            assert command.stdin is not None
            command.stdin.write("go\n")
            command.stdin.flush()
        said = [command.stdout.readline().strip() for command in commands if command.stdout is not None]
    finally:
        for command in commands:
            command.communicate(timeout=SECONDS)
    refused = [line for line in said if "cluster 'default' is up already" in line]
    assert len(refused) == NUM_COMMANDS - 1, said
    (directory,) = set(said) - set(refused)
    assert state.load("default").directory == directory


def test_a_state_file_of_before_has_a_supervisor_to_say_goodbye_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path))
    state.save(state.ClusterState(cluster="default", model="m", secret="s"))
    assert not state.load("default").is_supervised
    path = state.state_path("default")
    path.write_text(path.read_text().replace('"is_supervised": false,', ""))
    assert state.load("default").is_supervised
