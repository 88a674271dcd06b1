"""Commands against a real router and worker: output for programs, and hints about the next command for operators."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.requests.waiting_messages import SILENCE_SECONDS, waiting_line
from blockyard.proto.v1.cluster_pb2 import Worker, WorkerLoad, WorkerState
from blockyard.router.client import Client
from click.testing import CliRunner, Result

from tests.system.processes import SIMULATED, Processes, processes
from tools.cli_reference import all_commands

TALKS = {
    "blockyard chat",
    "blockyard config example",
    "blockyard export",
    "blockyard logs",
    "blockyard run-batch",
}
"""Commands that print a conversation, a file, or the lines of other processes."""
PROMPT = "def join_paths(first, second):\n    " * 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Its second router wants tokens."""
    folder = tmp_path_factory.mktemp("commands")
    auth_file = folder / "tokens.json"
    made = CliRunner().invoke(
        main,
        [
            "token",
            "new",
            "--name",
            "ann",
            "--role",
            "user",
            "--auth-file",
            str(auth_file),
            "--output",
            "json",
        ],
    )
    token = json.loads(made.stdout)["token"]
    with processes(folder, with_redis=True) as running:
        worker = running.add_worker("worker-0", *SIMULATED)
        router = running.add_router("router-0", workers=[worker.address])
        guarded = running.add_router("router-1", "--auth-file", str(auth_file), workers=[worker.address])
        running.start(worker, router, guarded)
        for address, shown in ((router.address, ""), (guarded.address, token)):
            with Client(address, timeout_seconds=60, token=shown) as client:
                client.generate(PROMPT, max_tokens=4)
        yield running


def run(cluster: Processes, router: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--router", cluster.routers[router].address])


def document(cluster: Processes, *arguments: str) -> Any:
    result = run(cluster, "router-0", *arguments, "--output", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_command_that_prints_can_print_json() -> None:
    without = set()
    for name, command in all_commands():
        outputs = [option for option in command.params if option.name == "output"]
        choices = outputs[0].type.choices if outputs and isinstance(outputs[0].type, click.Choice) else ()
        if "json" not in choices:
            without.add(name)
    assert without == TALKS


@pytest.mark.parametrize(("long", "short"), [("--output", "-o"), ("--config", "-c")])
def test_every_command_with_the_long_name_of_an_option_takes_the_short_one(long: str, short: str) -> None:
    named = [option for _, command in all_commands() for option in command.params if long in option.opts]
    assert named
    assert all(short in option.opts for option in named)


def test_doctor_prints_each_finding_for_programs() -> None:
    result = CliRunner().invoke(main, ["doctor", "--output", "json"])
    findings = json.loads(result.stdout)
    assert {"verdict": "ok", "subject": "python"}.items() <= findings[0].items()


def test_a_token_that_is_printed_for_programs_is_the_one_that_the_file_knows(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    arguments = [
        "token",
        "new",
        "--name",
        "ann",
        "--role",
        "user",
        "--auth-file",
        str(path),
        "--output",
        "json",
    ]
    made = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert json.loads(path.read_text()) == [made["entry"]]
    assert made["token"] not in path.read_text()


@pytest.mark.cluster
def test_explain_prints_each_term_of_each_worker(cluster: Processes) -> None:
    shown = run(cluster, "router-0", "explain", PROMPT)
    assert shown.exit_code == 0, shown.output
    for heading in (
        "worker",
        "cached",
        "queue",
        "prefill",
        "decode",
        "memory",
        "interference",
        "total",
        "cost",
    ):
        assert heading in shown.output
    explained = document(cluster, "explain", PROMPT)
    assert explained["chosen_worker_id"] == "worker-0"
    (candidate,) = explained["candidates"]
    assert candidate["cached_tokens"] + candidate["uncached_tokens"] > 16
    parts = ("queue_ms", "prefill_ms", "host_load_ms", "decode_ms", "memory_ms", "interference_ms")
    assert sum(candidate[part] for part in parts) == pytest.approx(candidate["total_ms"])


@pytest.mark.cluster
def test_all_that_is_wrong_with_a_question_is_told_at_once(cluster: Processes) -> None:
    result = run(cluster, "router-0", "explain", PROMPT, "--session-id", "a b", "--cache-salt", "c d")
    assert result.exit_code == 1
    assert "session_id: must be" in result.output
    assert "cache_salt: must be" in result.output


@pytest.mark.cluster
def test_drain_and_resume_print_what_became_of_the_worker(cluster: Processes) -> None:
    assert document(cluster, "drain", "worker-0", "--force") == {"worker": "worker-0", "moved": 0}
    assert document(cluster, "resume", "worker-0") == {"worker": "worker-0", "resumed": True}


@pytest.mark.cluster
@pytest.mark.parametrize("command", ["blocks", "drain", "resume", "flush"])
def test_a_worker_that_there_is_not_is_named_with_those_that_there_are(
    cluster: Processes, command: str
) -> None:
    result = run(cluster, "router-0", command, "worker-9")
    assert result.exit_code == 1
    assert result.output == "Error: no worker is called 'worker-9' (known: worker-0)\n"


@pytest.mark.cluster
def test_who_drains_the_last_worker_is_told_and_who_waits_for_one_is_told_what_ends_it(
    cluster: Processes,
) -> None:
    back = f"resume worker-0 --router {cluster.routers['router-0'].address}`"
    refused = run(cluster, "router-0", "drain", "worker-0")
    assert refused.exit_code == 1
    assert "no other worker takes requests" in refused.output
    assert "--force" in refused.output
    drained = run(cluster, "router-0", "drain", "worker-0", "--force")
    assert "worker-0 is the only worker that takes requests" in drained.stderr
    assert back in drained.stderr
    resumed = threading.Timer(2 * SILENCE_SECONDS, run, (cluster, "router-0", "resume", "worker-0"))
    resumed.start()
    waited = run(cluster, "router-0", "generate", PROMPT, "--max-tokens", "4")
    resumed.join()
    assert waited.exit_code == 0, waited.output
    assert "waiting for a worker: none takes requests (worker-0 DRAINING)" in waited.stderr
    assert back in waited.stderr
    assert "no answer" not in waited.stderr
    quick = run(cluster, "router-0", "generate", PROMPT, "--max-tokens", "4")
    assert "waiting for a worker" not in quick.stderr


@pytest.mark.cluster
def test_without_a_token_a_command_says_how_to_show_one(
    cluster: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOCKYARD_TOKEN", raising=False)
    result = run(cluster, "router-1", "workers")
    assert result.exit_code == 1
    assert "set BLOCKYARD_TOKEN, or give --token-file" in result.output


@pytest.mark.cluster
def test_an_error_of_a_request_names_it(cluster: Processes) -> None:
    # Whether an expression can be followed the worker finds out, once the router has taken the request in.
    result = run(cluster, "router-0", "generate", PROMPT, "--request-id", "mine-1", "--regex", "(?=a)b")
    assert result.exit_code == 1
    assert "(request mine-1)" in result.output


def test_what_is_waited_for_is_named_with_the_command_that_looks_into_it() -> None:
    lost = Worker(worker_id="w0", state=WorkerState.WORKER_STATE_LOST)
    busy = Worker(worker_id="w1", state=WorkerState.WORKER_STATE_READY, load=WorkerLoad(running=4, waiting=2))
    assert "none takes requests (w0 LOST); " in waiting_line([lost], "")
    assert "status --cluster trial` shows why" in waiting_line([lost], " --cluster trial")
    assert "the router knows no worker" in waiting_line([], "")
    assert "1 of 2 workers take requests, with 4 running and 2 waiting there" in waiting_line(
        [lost, busy], ""
    )
