"""The command line without a cluster: what it refuses, by which exit code, what it says then, and its help."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import click
import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.machine import state
from blockyard.deploy.requests.waiting_messages import waiting_line
from blockyard.deploy.settings.config_options import engine_config
from blockyard.deploy.settings.options import model_path
from blockyard.deploy.settings.setting import GROUPS, TESTS
from blockyard.proto.runtime.settings import parse_bytes, setting_fields
from blockyard.proto.v1.cluster_pb2 import Worker, WorkerLoad, WorkerState
from blockyard.worker.config import EngineConfig

from tools.cli_reference import all_commands

from .rig import cluster_state, dead_port, document, listening, refusal, run

TALKS = {"chat", "config example", "export", "logs", "run-batch"}
"""Commands that print a conversation, a file, or the lines of other processes."""


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("17", 17), ("60GB", 60 * 10**9), ("1.5 GiB", 3 * 2**29), ("2mib", 2**21)]
)
def test_sizes_are_decimal_or_binary_as_their_unit_says(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PB", "nan"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a number"):
        parse_bytes(text)


STARTS = "`blockyard up --model MODEL --cluster nowhere` starts it"
FINDS = (
    "`blockyard status --address HEAD:6379 --cluster nowhere` finds one that was started on another machine"
)


@pytest.mark.parametrize(
    ("command", "ways"),
    [
        ("down", f": {FINDS}"),
        ("open", f": {STARTS}, {FINDS}"),
        ("status", f": {STARTS}, {FINDS}"),
        *((line, f": {STARTS}, {FINDS}, or name a router with --router") for line in ("workers", "chat")),
        ("drain worker-0", f": {STARTS}, {FINDS}, or name a router with --router"),
    ],
)
def test_a_cluster_that_is_not_known_is_named_with_those_that_are_and_what_finds_it(
    command: str, ways: str
) -> None:
    told = "Error: no cluster 'nowhere' is known here"
    assert refusal(command, "--cluster", "nowhere", code=1) == f"{told}, and no other{ways}"
    for name in ("one", "two"):
        state.save(state.ClusterState(cluster=name, model="m", secret="s"))
    assert refusal(command, "--cluster", "nowhere", code=1) == f"{told}, only one, two (--cluster){ways}"
    told = refusal("status", code=1)
    assert "`blockyard up --model MODEL` starts it, `blockyard status --address HEAD:6379` finds one" in told


@pytest.mark.parametrize("command", ["workers", "generate x", "bench random"])
def test_a_cluster_that_is_still_starting_is_told_as_such(command: str) -> None:
    state.save(state.ClusterState(cluster="default", model="demo", secret="s"))
    assert "is still starting" in refusal(command, code=1)


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("workers --router http://127.0.0.1:50051/", 2, "without http://: did you mean 127.0.0.1:50051?"),
        ("workers --router 127.0.0.1", 2, "'127.0.0.1' has no port"),
        ("workers --router 127.0.0.1:1", 1, "no router answers at 127.0.0.1:1: connection refused"),
        (
            "workers --router host.invalid:5",
            1,
            "no router answers at host.invalid:5: no host of this name is known",
        ),
        ("generate def --timeout 0.5 --router 127.0.0.1:1", 1, "Error: "),
        *(
            (f"top --once --router 127.0.0.1:1 -o {form}", 1, "no router answers")
            for form in ("text", "json")
        ),
    ],
)
def test_a_router_that_cannot_be_reached_is_told_with_the_cause(command: str, code: int, told: str) -> None:
    assert told in refusal(command, code=code)


def test_a_port_that_speaks_http_is_told_to_be_no_routers() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = refusal(f"workers --router 127.0.0.1:{server.server_port}", code=1)
        server.shutdown()
    assert "speaks no gRPC: it is another service's port" in told


def test_up_gives_up_at_once_where_no_ray_answers_and_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, started = tmp_path / "redis-server", tmp_path / "redis was started"
    server.write_text(f"#!/bin/sh\necho > '{started}'\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    told = refusal("up --model demo --address 127.0.0.1:1", code=1)
    assert told == "Error: no Ray answers at 127.0.0.1:1: Connection refused"
    assert not started.exists()
    assert not home.exists()


def test_what_was_forgotten_of_a_joined_ray_is_told_with_all_that_still_takes_connections() -> None:
    with listening() as port:
        gone, router = f"127.0.0.1:{dead_port()}", f"127.0.0.1:{port}"
        joined = cluster_state(cluster="default", ray_address=gone, head=None, redis=None, routers=(router,))
        state.save(joined)
        told = run("down --forget")
        assert told.exit_code == 0, told.output
        assert "Ray was not asked, and no worker or router was ended" in told.stdout
        still = (
            f"These still take connections: {router}. If Ray still runs, `blockyard down --address {gone}`"
        )
        assert still in told.stdout
        assert state.known_clusters() == []
    state.save(joined)
    assert document("down --forget") == {
        "cluster": "default",
        "down": False,
        "forgotten": True,
        "answering": [],
    }


UP = "up --model demo"


@pytest.mark.parametrize(
    "line",
    [
        *(f"{UP} --block-size 17", f"{UP} --kv-cache-memory much", f"{UP} --workers 0"),
        *(f"{UP} --max-num-seqs 0", f"{UP} --max-outputs 0", f"{UP} --max-beam-width 0"),
        *(f"{UP} --max-requests 0", f"{UP} --max-queue-seconds nan", f"{UP} --max-tokens-admitted 0"),
        *(
            f"{UP} --tenant-weight research",
            f"{UP} --tenant-weight research=0",
            f"{UP} --tenant-weight 'a b=2'",
        ),
        *(f"{UP} --gpu-memory-utilization 1.5", f"{UP} --cluster ../../etc", f"{UP} --address nonsense"),
        *("up --model /no/such/folder", "down --cluster ../../etc", "size /no/such/folder"),
        *("doctor --model /no/such/folder", "doctor --address nonsense", "scale 0"),
        *(
            "generate x --max-tokens -1 --router h:1",
            f"chat --seed {2**63} --router h:1",
            "workers --router=",
        ),
    ],
)
def test_a_value_that_cannot_be_ends_with_code_2_before_anything_starts(line: str, home: Path) -> None:
    result = run(line, input="hello\n")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Error" in result.output
    assert not home.exists()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"{UP} --cors-origin *", "an origin is like"),
        (f"{UP} --placement near_equal=1", "'near_equal=1' sets none of"),
        (f"{UP} --default-timeout-seconds 0", "default_timeout_seconds must be above 0, not 0"),
        (f"{UP} --slow-reader-seconds nan", "slow_reader_seconds must be above 0, not nan"),
        (f"{UP} --no-worker-seconds -1", "no_worker_seconds must not be negative, not -1"),
        (f"{UP} --lease-seconds inf", "lease_seconds must be finite and above 0, not inf"),
        (f"{UP} --max-waiting 0", "max_waiting must be at least 1, not 0"),
        ("figures --folder pictures", "--output png"),
        ("bench --num-requests 8", "Put it after a workload that has it: `bench random`."),
        ("bench shared-prefix --num-requests 8", "by --groups times (1 + --followers)"),
        ("bench chat --num-requests 8", "`bench chat` by --sessions and --turns"),
        (
            "bench chat --requests 8",
            "`bench random` has --num-requests. Other workloads set their number of requests",
        ),
        ("bench --num-prompts 8 random", "`bench random` has --num-requests."),
        ("bench random --requests 8", "No such option '--requests'. Did you mean '--num-requests'?"),
        ("bench random --groups 2", "a workload that has it: `bench shared-prefix`."),
        ("bench --rounds 2 random", "`bench chat`, `bench random`, `bench shared-prefix`, `bench trace`."),
    ],
)
def test_a_wrong_option_says_what_would_be_right(line: str, told: str, home: Path) -> None:
    assert told in refusal(line)
    assert not home.exists()
    assert not Path("pictures").exists()


def test_an_option_that_no_workload_has_gets_no_such_hint() -> None:
    assert "workload that has it" not in refusal("bench random --groop 2")


def test_the_options_of_up_are_the_engines_settings_with_their_defaults_and_words() -> None:
    parameters = {parameter.name: parameter for parameter in main.commands["up"].params}
    assert [member.name for member in setting_fields(EngineConfig)] == [*EngineConfig.__dataclass_fields__]
    members = {member.name: member for member in setting_fields(EngineConfig) if member.name != "model"}
    values = {name: parameters[name].default for name in members}
    assert engine_config({"model": "demo", **values}) == EngineConfig(model=model_path("demo"))
    for name, member in members.items():
        assert getattr(parameters[name], "help", None) == member.description.help != "", name


@pytest.mark.parametrize("command", ["serve", "up"])
def test_help_lists_the_options_in_groups_within_80_columns_and_hides_those_of_tests(command: str) -> None:
    lines = run(f"{command} --help", terminal_width=80).stdout.splitlines()
    headings = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert headings == [group for group in GROUPS if group != TESTS]
    assert max(map(len, lines)) <= 80
    told = "\n".join(lines)
    options = [option for option in main.commands[command].params if option.name != "given_model"]
    assert [option.name for option in options if option.opts[-1] not in told] == [
        *("simulated_prefill_tokens_per_second", "simulated_step_seconds", "simulated_fault")
    ]


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_explains_itself(command: str) -> None:
    result = run(f"{command} --help")
    assert (result.exit_code, "Usage:" in result.output, "Error" in result.output) == (0, True, False)


def test_every_command_that_prints_can_print_json_and_has_the_short_names_of_its_options() -> None:
    without = set()
    for name, command in all_commands():
        options = {long: option for option in command.params for long in option.opts}
        kind = options["--output"].type if "--output" in options else None
        if not isinstance(kind, click.Choice) or "json" not in kind.choices:
            without.add(name.removeprefix("blockyard "))
        for long, short in (("--output", "-o"), ("--config", "-c")):
            assert (long in options) <= (short in options), name
    assert without == TALKS


def test_a_token_that_is_printed_for_programs_is_the_one_that_the_file_knows(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    made = document("token new --name ann --role user --auth-file", str(path))
    assert json.loads(path.read_text()) == [made["entry"]]
    assert made["token"] not in path.read_text()


def test_what_is_waited_for_is_named_with_the_command_that_looks_into_it() -> None:
    lost = Worker(worker_id="w0", state=WorkerState.WORKER_STATE_LOST)
    busy = Worker(worker_id="w1", state=WorkerState.WORKER_STATE_READY, load=WorkerLoad(running=4, waiting=2))
    told = waiting_line([lost], " --cluster trial")
    assert "none takes requests (w0 LOST); " in told
    assert "status --cluster trial` shows why" in told
    assert "the router knows no worker" in waiting_line([], "")
    assert "1 of 2 workers take requests, with 4 running and 2 waiting there" in waiting_line(
        [lost, busy], ""
    )
