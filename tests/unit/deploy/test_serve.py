"""`serve` and `up`: ports, the one rule for the addresses of routers, the model's names, and the text about them."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from blockyard.deploy.commands import lifecycle
from blockyard.deploy.demo.__main__ import demo_options
from blockyard.deploy.lifecycle import preflight
from blockyard.deploy.machine import state
from blockyard.deploy.machine.processes import session_members
from blockyard.deploy.machine.shared_port import can_bind, next_free, reserved_port
from blockyard.deploy.settings.options import MAX_TEMPLATE_BYTES
from blockyard.deploy.settings.security import SecurityOptions
from blockyard.deploy.settings.up_options import SERVE_PORTS, UP_PORTS
from blockyard.deploy.supervision.replicas import Replica, router_config
from blockyard.proto.limits import MAX_PORT
from blockyard.proto.naming.model_files import model_names
from blockyard.proto.security.loopback import is_every_interface, is_loopback
from blockyard.proto.security.tls_files import ServerTls
from blockyard.router.config import RouterConfig
from hypothesis import given
from hypothesis import strategies as st

from .rig import HEAD, listening, options_of, refusal, run, spec

CLUSTER = state.ClusterState(cluster="default", model="demo", secret="s", head=HEAD)

PORTS = st.integers(min_value=1, max_value=40)


@given(taken=st.sets(PORTS), first=PORTS, num_ports=st.integers(min_value=1, max_value=4))
def test_the_next_free_ports_are_free_and_the_lowest_in_a_row(
    taken: set[int], first: int, num_ports: int
) -> None:
    fits: Callable[[int], bool] = lambda start: not taken & set(range(start, start + num_ports))  # noqa: E731
    found = next_free(first, num_ports, lambda port: port not in taken)
    assert found >= first
    assert fits(found)
    assert not any(fits(start) for start in range(first, found))
    with pytest.raises(ValueError, match=f"no port from {MAX_PORT - 1} on is free"):
        next_free(MAX_PORT - 1, 3, lambda port: True)


def test_serve_has_the_usual_ports_and_up_has_none() -> None:
    served, up = options_of("serve demo"), options_of("up --model demo")
    assert (served.http_port, served.router_port) == (8000, 50051)
    assert served.movable_ports == {"http_port", "router_port"}
    assert (up.http_port, up.router_port) == (None, 0)


def test_a_usual_port_that_is_taken_gives_way_to_the_next_one_and_that_is_said() -> None:
    with listening() as http, listening() as grpc:
        wanted = replace(options_of("serve demo"), http_port=http, router_port=grpc)
        moved, told = preflight.ports_moved(wanted)
        assert moved.http_port is not None
        assert (moved.http_port > http, moved.router_port > grpc) == (True, True)
        assert moved.http_port != moved.router_port
        assert set(told) == {
            f"port {http} is taken: HTTP is served on {moved.http_port}",
            f"port {grpc} is taken: gRPC is served on {moved.router_port}",
        }
        assert preflight.ports_moved(moved) == (moved, [])
    moved, _ = preflight.ports_moved(options_of("serve demo --router-port 8000"))
    assert moved.router_port == 8000
    assert moved.http_port not in (None, 8000)


def test_a_port_that_was_asked_for_and_is_taken_is_an_error() -> None:
    with listening() as taken:
        wanted = options_of("serve", "demo", "--device", "cpu", "--router-port", "0", "--port", str(taken))
        assert preflight.ports_moved(wanted) == (wanted, [])
        assert ("router port", f"--http-port: port {taken} is taken") in list(preflight.problems(wanted))


def test_routers_with_ports_of_their_own_find_as_many_in_a_row() -> None:
    with listening() as taken:
        apart = options_of("serve demo --routers 2 --separate-ports")
        moved, _ = preflight.ports_moved(replace(apart, http_port=taken - 1))
        assert moved.http_port is not None
        assert moved.http_port > taken


@pytest.mark.parametrize("address", ["", " --address 10.0.0.1:6379"])
@pytest.mark.parametrize("command", ["serve demo", "up --model demo"])
def test_routers_bind_loopback_unless_they_are_told_another_host(command: str, address: str) -> None:
    made, opened = (spec(options_of(f"{command}{address}{host}")) for host in ("", " --host 0.0.0.0"))
    assert (made.router.host, opened.router.host) == ("127.0.0.1", "0.0.0.0")
    # Of a joined cluster each node says its own; workers are for routers alone, which have the cluster's secret.
    assert opened.router.advertise_host == (None if address else "127.0.0.1")
    assert made.worker.host == opened.worker.host == ("" if address else "127.0.0.1")


@pytest.mark.parametrize(
    ("host", "bound"), [("::1", "[::1]"), ("[::]", "[::]"), ("0.0.0.0", "0.0.0.0"), ("gpu-1", "gpu-1")]
)
def test_an_ipv6_address_is_bound_in_brackets(host: str, bound: str) -> None:
    assert options_of(f"serve demo --host {host}").host == bound


@pytest.mark.parametrize(
    ("host", "is_alone", "is_all"),
    [
        ("127.0.0.1", True, False),
        ("[::1]", True, False),
        ("localhost", True, False),
        ("0.0.0.0", False, True),
        ("[::]", False, True),
        ("::", False, True),
        ("", False, True),
        ("10.0.0.1", False, False),
    ],
)
def test_hosts_are_loopback_or_every_interface_or_one(host: str, is_alone: bool, is_all: bool) -> None:
    assert (is_loopback(host), is_every_interface(host)) == (is_alone, is_all)


def test_who_opens_a_cluster_to_others_without_tokens_or_tls_is_warned(tmp_path: Path) -> None:
    local, opened = options_of("serve demo"), options_of("serve demo --host 0.0.0.0")
    assert local.exposure is None
    assert opened.exposure is not None
    assert "WHOEVER REACHES 0.0.0.0 MAY CALL EVERYTHING" in opened.exposure
    guarded = replace(opened, security=SecurityOptions(auth_file=str(tmp_path / "tokens.json")))
    assert guarded.exposure == (
        "prompts and tokens go over 0.0.0.0 in plaintext: give --tls-cert and --tls-key"
    )
    tls = ServerTls(cert="c.pem", key="c.key")
    assert replace(guarded, security=replace(guarded.security, tls=tls)).exposure is None


def test_a_file_without_a_token_opens_no_cluster_and_signs_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.touch(mode=0o600)
    told = refusal(f"workers --router 127.0.0.1:1 --token-file {file}")
    assert f"token file {file} holds no token" in told
    for text, why in (("[]", "has no token"), ("", "it is empty")):
        file.write_text(text)
        wanted = options_of(f"serve demo --device cpu --auth-file {file}")
        ((subject, detail),) = preflight.problems(wanted)
        assert (subject, why in detail, str(file) in detail) == ("security", True, True)


@pytest.mark.parametrize(
    ("model", "chosen", "names"),
    [
        ("Qwen/Qwen3-0.6B", (), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")),
        ("gpt2", (), ("gpt2",)),
        ("/models/llama", (), ("llama",)),
        ("models/mine", (), ("mine",)),
        ("Qwen/Qwen3-0.6B", ("a", "b", "a"), ("a", "b")),
    ],
)
def test_a_hub_model_has_its_full_name_and_its_short_one_and_a_folder_its_last_part(
    model: str,
    chosen: tuple[str, ...],
    names: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_names(model, chosen) == names


def test_the_model_is_named_by_an_argument_an_option_or_a_file_with_its_revision(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[engine]\nmodel = "demo"\n', encoding="utf-8")
    for line in ("serve demo", "serve --model demo", f"serve --config {file}"):
        assert options_of(line).served_names == ("demo",)
    for line in ("serve Qwen/Qwen3-0.6B --revision v1.5", "serve Qwen/Qwen3-0.6B@v1.5"):
        options = options_of(line)
        assert options.engine.model == "Qwen/Qwen3-0.6B@v1.5"
        assert options.served_names == ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")
    file.write_text("{{ messages }}", encoding="utf-8")
    assert options_of(f"serve demo --chat-template {file}").chat_template == "{{ messages }}"
    file.write_bytes(b"{" * (MAX_TEMPLATE_BYTES + 1))
    assert "is longer than" in refusal(f"serve demo --chat-template {file}")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("serve", "Missing argument 'MODEL'."),
        ("serve demo --revision v1", "a revision is of a model on the hub"),
        ("serve a/b@v1 --revision v2", "names its revision already"),
        ("serve demo --chat-template /nowhere", "cannot be read (FileNotFoundError): /nowhere"),
        ("serve demo --download-dir x --address ray:1", "--download-dir is a folder of this machine"),
        ("serve demo --tokenizer 'no such/thing/here'", "is no folder here, and no hub name"),
        ("serve demo --served-model-name ''", "a model's name must not be empty"),
        ("serve demo --host ''", "is an address without port"),
        ("serve demo --host 0.0.0.0:8000", "is an address without port"),
        ("serve demo --host ::1:x", "is an address without port"),
    ],
)
def test_a_wrong_model_or_host_is_refused(line: str, why: str) -> None:
    assert why in refusal(line)


@pytest.mark.parametrize("content", [None, '{"cluster": "def'])
def test_serve_goes_on_and_writes_its_state_file_anew_where_that_was_lost_or_damaged(
    content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of this very process stands for the head's."""
    monkeypatch.setattr(lifecycle, "END_LOOK_SECONDS", 0.0)
    session = os.getsid(0)
    served = replace(
        CLUSTER, head=state.HeadState(session=session, processes=tuple(session_members(session)))
    )
    path, steps = state.state_path(served.cluster), 0

    def incidents() -> Iterator[str]:
        nonlocal steps
        steps += 1
        if steps == 1:
            path.unlink(missing_ok=True) if content is None else path.write_text(content)
        elif steps == 3:
            assert state.load(served.cluster) == served
            state.save(replace(served, identity="of another start"))  # It ends the loop.
        yield from ()

    state.save(served)
    lifecycle.wait_for_end(served, incidents)
    assert steps == 3


def test_serve_ends_where_its_ray_has_ended_or_another_command_has_taken_the_cluster_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "END_LOOK_SECONDS", 0.0)
    lifecycle.wait_for_end(CLUSTER)
    state.save(replace(CLUSTER, identity="of another start"))
    lifecycle.wait_for_end(CLUSTER)
    state.save(CLUSTER)
    with pytest.raises(RuntimeError, match="Ray has ended"):
        lifecycle.wait_for_end(CLUSTER)


def test_a_demo_that_may_stay_is_where_the_examples_look_for_it() -> None:
    staying, passing = demo_options(may_stay=True), demo_options(may_stay=False)
    assert {name: getattr(staying, name) for name in SERVE_PORTS} == SERVE_PORTS
    assert staying.movable_ports == SERVE_PORTS.keys()
    assert {name: getattr(passing, name) for name in UP_PORTS} == UP_PORTS


def test_a_dry_run_tells_the_ports_that_it_would_take_and_warns_of_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening() as taken:
        monkeypatch.setenv("BLOCKYARD_UP_ROUTER_PORT", str(taken))
        told = run("serve demo --device cpu --host 0.0.0.0 --dry-run --output json")
    plan = json.loads(told.stdout)
    (router,) = plan["routers"]
    assert router.startswith(f"0.0.0.0, port {taken}, HTTP on port ")
    findings = {(finding["verdict"], finding["detail"]) for finding in plan["findings"]}
    assert ("fail", f"--router-port: port {taken} is taken") in findings, "a variable asks for it, too"
    assert any(verdict == "warn" and "MAY CALL EVERYTHING" in detail for verdict, detail in findings)


HOST = "127.0.0.1"


def test_a_port_is_held_until_those_who_share_it_listen() -> None:
    with reserved_port(HOST, 0) as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, port))
        sharers = [socket.create_server((HOST, port), reuse_port=True) for _ in range(2)]
    for sharer in sharers:
        sharer.close()


@pytest.mark.parametrize("shares", [True, False])
def test_a_port_that_somebody_listens_on_is_refused_even_if_he_would_share_it(shares: bool) -> None:
    with socket.create_server((HOST, 0), reuse_port=shares) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"share port {port}"), reserved_port(HOST, port):
            pass


def test_a_port_that_was_just_in_use_is_free_and_one_of_ipv6_can_be_shared() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    with reserved_port(HOST, port) as reserved:
        assert reserved == port
    with (
        reserved_port("[::1]", 0) as port,
        socket.create_server(("::1", port), family=socket.AF_INET6, reuse_port=True),
    ):
        assert not can_bind("[::1]", port)
    assert can_bind("[::1]", port)


@pytest.mark.parametrize(
    ("port", "reuse_port", "address", "expected"),
    [
        (7000, True, "", 7000),
        (7000, False, "", 7002),
        (0, False, "", 0),
        (7000, False, "127.0.0.1:7002", 7002),
        (0, False, "127.0.0.1:4321", 4321),
        (7000, True, "127.0.0.1:7000", 7000),
    ],
)
def test_routers_share_a_port_or_stand_side_by_side_and_come_back_where_they_were(
    port: int, reuse_port: bool, address: str, expected: int
) -> None:
    replica = Replica(name="router-2", kind="router", address=address)
    router = RouterConfig(model="m", port=port, reuse_port=reuse_port)
    assert (router_config(router, replica).port, router_config(router, replica).http_port) == (expected, None)
    replica = Replica(name="router-2", kind="router", address="127.0.0.1:1", http_address=address)
    gateway = RouterConfig(model="m", http_port=port, reuse_port=reuse_port)
    assert router_config(gateway, replica).http_port == expected
