"""Only one of several simultaneous `up` commands with the same name and home continues."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.lifecycle import cluster, driver
from blockyard.deploy.machine import state
from click.testing import CliRunner

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


@pytest.mark.ci
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


def test_an_end_without_a_drain_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: state.ClusterState) -> None:
        raise TimeoutError

    head = state.HeadState(session=1, processes=())
    started = state.ClusterState(
        cluster="default", model="m", secret="s", ray_address="127.0.0.1:1", is_supervised=True, head=head
    )
    monkeypatch.setattr(cluster, "owns_session", lambda *_: True)
    monkeypatch.setattr(cluster, "end_session", lambda *_: None)
    monkeypatch.setattr(cluster, "_remove_files", lambda _: None)
    monkeypatch.setattr(driver, "driver", silent)
    told: list[str] = []
    cluster.down(started, report=lambda progress: told.append(progress.warning))
    assert "routers and workers are killed, not drained: Ray does not answer (TimeoutError)" in told


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: {key: value for key, value in document.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (without("head"), "it lacks head"),
        (without("secret"), "it lacks secret"),
        (lambda document: document | {"head": {"session": 1}}, "'processes' is missing"),
        (
            lambda document: document | {"from_the_future": 1},
            "it has from_the_future, unknown to this version",
        ),
        (lambda document: document | {"redis": 5}, "'int' object"),
        (lambda document: [document], "it holds no JSON object but a list"),
    ],
)
@pytest.mark.parametrize("command", ["status", "down", "workers"])
def test_a_damaged_state_file_is_named_with_what_to_do(
    spoil: Callable[[dict[str, Any]], object],
    why: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path))
    state.save(state.ClusterState(cluster="default", model="m", secret="CANARY"))
    path = state.state_path("default")
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    told = CliRunner().invoke(main, [command])
    assert told.exit_code == 1
    assert told.output.startswith(f"Error: {path} does not say what `up` writes of a cluster: ")
    assert why in told.output
    assert told.output.endswith("end the cluster's processes, then delete the file\n")
    assert "CANARY" not in told.output
