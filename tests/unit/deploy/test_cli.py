"""The command line without a cluster: what it passes on, what it refuses, and what it must never show."""

import http.server
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.lifecycle.cluster_spec import spec_of
from blockyard.deploy.lifecycle.shape import Shape, cpus_per_rank
from blockyard.deploy.machine import state
from blockyard.deploy.machine.processes import ProcessIdentity, identify
from blockyard.deploy.settings.config_options import engine_config
from blockyard.deploy.settings.options import model_path
from blockyard.deploy.settings.setting import GROUPS, TESTS, taken
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.runtime.settings import parse_bytes, setting_fields
from blockyard.router.config import RouterConfig, RouterLimits
from blockyard.router.placement.config import PlacementConfig
from blockyard.worker.config import EngineConfig
from click.testing import CliRunner, Result

SECRET = "a-secret-that-nobody-may-see"
ONE_WORKER = Shape(num_workers=1, num_cpus=1.0, num_gpus=0.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "home"
    monkeypatch.setenv(state.HOME_VARIABLE, str(directory))
    for variable in ("BLOCKYARD_REDIS_URL", "BLOCKYARD_ROUTER", "BLOCKYARD_CLUSTER"):
        monkeypatch.delenv(variable, raising=False)
    return directory


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def cluster_state(**changes: object) -> state.ClusterState:
    values: dict[str, object] = {
        "cluster": "trial",
        "model": "demo",
        "secret": SECRET,
        "redis_url": f"redis://:{SECRET}@127.0.0.1:1/0",
        "routers": ("127.0.0.1:1",),
        "head": state.HeadState(session=7, processes=(ProcessIdentity(pid=7, start_ticks=1),)),
        "redis": state.RedisState(
            process=ProcessIdentity(pid=8, start_ticks=2), port=1, log_path="redis.log"
        ),
    }
    return state.ClusterState(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("17", 17), ("60GB", 60 * 10**9), ("1.5 GiB", 3 * 2**29), ("2mib", 2**21)]
)
def test_sizes_are_decimal_or_binary_as_their_unit_says(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PB", "nan"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a number"):
        parse_bytes(text)


@pytest.mark.parametrize("command", ["down", "status", "workers", "blocks", "chat"])
def test_a_cluster_that_is_not_known_is_named(command: str) -> None:
    result = run(command, "--cluster", "nowhere")
    assert result.exit_code == 1
    assert result.output.startswith("Error: no cluster 'nowhere' is known here")


STARTS = "`blockyard up --model MODEL --cluster nowhere` starts it"
FINDS = (
    "`blockyard status --address HEAD:6379 --cluster nowhere` finds one that was started on another machine"
)


@pytest.mark.parametrize(
    ("command", "ways"),
    [
        (("down",), f": {FINDS}"),
        (("open",), f": {STARTS}, {FINDS}"),
        (("status",), f": {STARTS}, {FINDS}"),
        (("workers",), f": {STARTS}, {FINDS}, or name a router with --router"),
    ],
)
def test_who_names_no_known_cluster_is_told_those_that_are_and_what_this_command_takes(
    command: tuple[str, ...], ways: str
) -> None:
    told = "Error: no cluster 'nowhere' is known here"
    assert run(*command, "--cluster", "nowhere").output.strip() == f"{told}, and no other{ways}"
    for name in ("one", "two"):
        state.save(state.ClusterState(cluster=name, model="m", secret="s"))
    assert run(*command, "--cluster", "nowhere").output.strip() == f"{told}, only one, two (--cluster){ways}"


def test_the_default_cluster_needs_no_name() -> None:
    told = run("status").output
    assert "`blockyard up --model MODEL` starts it, `blockyard status --address HEAD:6379` finds one" in told


def test_a_router_that_does_not_answer_is_an_error_and_no_traceback() -> None:
    result = run("generate", "def", "--router", "127.0.0.1:1", "--timeout", "0.5")
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")


@pytest.mark.parametrize(
    ("address", "code", "told"),
    [
        ("http://127.0.0.1:50051/", 2, "without http://: did you mean 127.0.0.1:50051?"),
        ("127.0.0.1", 2, "'127.0.0.1' has no port"),
        ("127.0.0.1:1", 1, "no router answers at 127.0.0.1:1: connection refused"),
        ("host.invalid:5", 1, "no router answers at host.invalid:5: no host of this name is known"),
    ],
)
def test_a_router_that_cannot_be_reached_is_told_with_the_cause(address: str, code: int, told: str) -> None:
    result = run("workers", "--router", address)
    assert result.exit_code == code
    assert told in result.output


def test_a_port_that_speaks_http_is_told_to_be_no_routers() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = run("workers", "--router", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result.exit_code == 1
    assert "speaks no gRPC: it is another service's port" in result.output


def test_up_gives_up_at_once_where_no_ray_answers_and_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "redis was started"
    server = tmp_path / "bin" / "redis-server"
    server.parent.mkdir()
    server.write_text(f"#!/bin/sh\necho > '{started}'\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(server.parent), prepend=":")
    result = run("up", "--model", "demo", "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.output.splitlines() == ["Error: no Ray answers at 127.0.0.1:1: Connection refused"]
    assert not started.exists()
    assert not home.exists()


def test_down_says_that_a_joined_ray_is_gone_and_forgets_it_on_request() -> None:
    state.save(cluster_state(ray_address="127.0.0.1:1", head=None, redis=None))
    refused = run("down", "--cluster", "trial")
    assert refused.exit_code == 1
    assert "no Ray answers at 127.0.0.1:1" in refused.output
    assert run("down", "--cluster", "trial", "--forget").exit_code == 0
    assert state.known_clusters() == []


def test_the_options_of_up_are_the_engines_settings_with_their_defaults() -> None:
    parameters = {parameter.name: parameter for parameter in main.commands["up"].params}
    names = [name for name in EngineConfig.__dataclass_fields__ if name != "model"]
    values = {name: parameters[name].default for name in names}
    assert engine_config({"model": "demo", **values}) == EngineConfig(model=model_path("demo"))


def test_every_setting_of_the_engine_is_explained() -> None:
    parameters = {parameter.name: parameter for parameter in main.commands["up"].params}
    names = EngineConfig.__dataclass_fields__.keys()
    assert [member.name for member in setting_fields(EngineConfig)] == list(names)
    told = {name: getattr(parameters[name], "help", None) for name in names if name != "model"}
    assert told == {
        member.name: member.description.help
        for member in setting_fields(EngineConfig)
        if member.name != "model"
    }
    assert all(told.values())


@pytest.mark.parametrize("command", ["serve", "up"])
def test_help_lists_the_options_in_groups_within_80_columns_and_hides_those_of_tests(command: str) -> None:
    lines = CliRunner().invoke(main, [command, "--help"], terminal_width=80).stdout.splitlines()
    headings = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert headings == [group for group in GROUPS if group != TESTS]
    assert max(map(len, lines)) <= 80
    told = "\n".join(lines)
    hidden = [option for option in main.commands[command].params if option.name not in ("given_model",)]
    assert [option.name for option in hidden if option.opts[-1] not in told] == [
        "simulated_prefill_tokens_per_second",
        "simulated_step_seconds",
        "simulated_fault",
    ]


def test_limits_of_a_request_reach_the_routers_and_are_by_default_their_own() -> None:
    engine = EngineConfig(model="demo")
    limited = UpOptions(engine=engine, limits=RouterLimits(max_outputs=3, max_beam_width=5))
    routers = [
        spec_of(cluster_state(), options, ONE_WORKER).router
        for options in (limited, UpOptions(engine=engine))
    ]
    own = RouterConfig(model="demo")
    assert [(router.max_outputs, router.max_beam_width) for router in routers] == [
        (3, 5),
        (own.max_outputs, own.max_beam_width),
    ]


def test_what_routers_admit_is_set_by_options_of_up_and_is_by_default_their_own() -> None:
    parameters = ("--max-requests", "5", "--max-tokens-admitted", "600", "--max-queue-seconds", "7.5")
    weights = ("--tenant-weight", "research=2", "--tenant-weight", "batch=0.5")
    own = RouterConfig(model="demo")
    for arguments, expected in (
        ((*parameters, *weights), (5, 600, 7.5, {"research": 2.0, "batch": 0.5})),
        ((), (own.max_requests, own.max_tokens_admitted, own.max_queue_seconds, own.tenant_weights)),
    ):
        values = main.commands["up"].make_context("up", ["--model", "demo", *arguments]).params
        options = UpOptions(engine=EngineConfig(model="demo"), limits=taken(RouterLimits, values))
        router = spec_of(cluster_state(), options, ONE_WORKER).router
        assert (
            router.max_requests,
            router.max_tokens_admitted,
            router.max_queue_seconds,
            router.tenant_weights,
        ) == expected


def test_policy_and_placement_settings_reach_the_routers() -> None:
    arguments = ["--model", "demo", "--policy", "dynamo", "--placement", "dynamo_temperature=0.5"]
    values = main.commands["up"].make_context("up", arguments).params
    chosen = {name: values[name] for name in ("policy", "placement")}
    options = UpOptions(engine=EngineConfig(model="demo"), **chosen)
    router = spec_of(cluster_state(), options, ONE_WORKER).router
    assert (router.policy, router.placement) == ("dynamo", PlacementConfig(dynamo_temperature=0.5))


def test_origins_of_web_pages_reach_the_routers_and_are_checked_before_anything_starts() -> None:
    origins = ("https://chat.example", "http://127.0.0.1:3000")
    arguments = ["--model", "demo", *(word for origin in origins for word in ("--cors-origin", origin))]
    values = main.commands["up"].make_context("up", arguments).params
    options = UpOptions(engine=EngineConfig(model="demo"), cors_origins=values["cors_origins"])
    assert spec_of(cluster_state(), options, ONE_WORKER).router.cors_origins == origins
    result = run("up", "--model", "demo", "--cors-origin", "*")
    assert result.exit_code == 2
    assert "an origin is like" in " ".join(result.output.split())


def test_a_placement_setting_that_does_not_exist_is_named_before_anything_starts() -> None:
    result = run("up", "--model", "demo", "--placement", "near_equal=1")
    assert result.exit_code == 2
    assert "'near_equal=1' sets none of" in result.output
    assert state.known_clusters() == []


def test_a_folder_for_pictures_is_refused_where_none_are_drawn(tmp_path: Path) -> None:
    result = run("figures", "--folder", str(tmp_path / "pictures"))
    assert result.exit_code == 2
    assert "--output png" in result.output
    assert not (tmp_path / "pictures").exists()


def test_a_state_file_is_its_owners_alone_and_reads_back_the_same(home: Path) -> None:
    state.save(cluster_state())
    path = state.state_path("trial")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert state.load("trial") == cluster_state()
    assert [entry.name for entry in home.iterdir()] == ["trial.json"]


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert "Error" not in result.output


def test_a_cluster_that_another_up_is_making_counts_as_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        making = cluster_state(starter=identify(other.pid), head=None, redis=None, ray_address=None)
        assert making.anything_alive()
        other.kill()
        other.wait(10)
        assert not making.anything_alive()


def test_a_state_shows_no_secret() -> None:
    assert SECRET not in repr(cluster_state())


def test_a_state_whose_processes_are_gone_is_not_alive_but_a_joined_cluster_is() -> None:
    assert not cluster_state(ray_address="10.0.0.1:6379").anything_alive()
    assert cluster_state(ray_address="10.0.0.1:6379", head=None).anything_alive()


@pytest.mark.parametrize(
    ("node_cpus", "num_workers", "share"),
    [([2], 1, 2), ([2], 2, 1), ([8], 3, 2), ([2], 8, 0.25), ([3, 3], 3, 1), ([2, 2], 1, 2), ([1, 1], 3, 0.5)],
)
def test_workers_get_the_most_cpus_with_which_all_fit_on_the_nodes(
    node_cpus: list[float], num_workers: int, share: float
) -> None:
    assert cpus_per_rank(node_cpus, num_workers) == share
    assert sum(int(cpus // share) for cpus in node_cpus) >= num_workers


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"num_routers": 0}, {"cluster": "a b"}])
def test_a_cluster_without_a_worker_a_router_or_a_name_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cluster"):
        UpOptions(engine=EngineConfig(model="demo"), **settings)  # type: ignore[arg-type]
