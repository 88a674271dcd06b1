"""`serve` and `up`: ports, the one rule for the addresses of routers, the model's names, and the text about them."""

import json
import os
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.commands import lifecycle
from blockyard.deploy.demo.__main__ import demo_options
from blockyard.deploy.lifecycle import preflight
from blockyard.deploy.lifecycle.cluster_spec import spec_of
from blockyard.deploy.lifecycle.shape import Shape
from blockyard.deploy.machine import state
from blockyard.deploy.machine.processes import ProcessIdentity, session_members
from blockyard.deploy.machine.shared_port import can_bind, next_free, reserved_port
from blockyard.deploy.settings.options import MAX_TEMPLATE_BYTES
from blockyard.deploy.settings.security import SecurityOptions
from blockyard.deploy.settings.up_options import SERVE_PORTS, UP_PORTS, up_options
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.views import views
from blockyard.proto.limits import MAX_PORT
from blockyard.proto.naming.model_files import model_names
from blockyard.proto.naming.pooling import MODULES_FILE
from blockyard.proto.security.loopback import is_every_interface, is_loopback
from blockyard.proto.security.tls_files import ServerTls
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

ONE_WORKER = Shape(num_workers=1, num_cpus=1.0, num_gpus=0.0)
HEAD = state.HeadState(session=7, processes=(ProcessIdentity(pid=7, start_ticks=1),))
CLUSTER = state.ClusterState(cluster="default", model="demo", secret="s", head=HEAD)
PORTS = st.integers(min_value=1, max_value=40)


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    for variable in ("BLOCKYARD_REDIS_URL", "BLOCKYARD_CLUSTER", "BLOCKYARD_CONFIG"):
        monkeypatch.delenv(variable, raising=False)


def options_of(command: str, *arguments: str) -> UpOptions:
    context = main.commands[command].make_context(command, list(arguments), parent=click.Context(main))
    values: dict[str, Any] = dict(context.params)
    values["model"] = values.pop("given_model", None) or values["model"]
    del values["is_dry"], values["output"]
    return up_options(values, default_ports=SERVE_PORTS if command == "serve" else UP_PORTS)


def printed(view: RenderableType) -> list[str]:
    output = StringIO()
    Console(file=output, width=120).print(view)
    return [line.rstrip() for line in output.getvalue().splitlines()]


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@given(taken=st.sets(PORTS), first=PORTS, num_ports=st.integers(min_value=1, max_value=4))
def test_the_next_free_ports_are_free_and_the_lowest_in_a_row(
    taken: set[int], first: int, num_ports: int
) -> None:
    fits: Callable[[int], bool] = lambda start: not taken & set(range(start, start + num_ports))  # noqa: E731
    found = next_free(first, num_ports, lambda port: port not in taken)
    assert found >= first
    assert fits(found)
    assert not any(fits(start) for start in range(first, found))


def test_where_no_port_is_free_that_is_said() -> None:
    with pytest.raises(ValueError, match=f"no port from {MAX_PORT - 1} on is free"):
        next_free(MAX_PORT - 1, 3, lambda port: True)


def test_serve_has_the_usual_ports_and_up_has_none() -> None:
    served, up = options_of("serve", "demo"), options_of("up", "--model", "demo")
    assert (served.http_port, served.router_port) == (8000, 50051)
    assert served.movable_ports == {"http_port", "router_port"}
    assert (up.http_port, up.router_port) == (None, 0)


def test_a_usual_port_that_is_taken_gives_way_to_the_next_one_and_that_is_said() -> None:
    with listening() as http, listening() as grpc:
        wanted = replace(options_of("serve", "demo"), http_port=http, router_port=grpc)
        moved, told = preflight.ports_moved(wanted)
        assert moved.http_port is not None
        assert moved.http_port > http
        assert moved.router_port > grpc
        assert moved.http_port != moved.router_port
        assert set(told) == {
            f"port {http} is taken: HTTP is served on {moved.http_port}",
            f"port {grpc} is taken: gRPC is served on {moved.router_port}",
        }
        assert preflight.ports_moved(moved) == (moved, [])


def test_a_port_that_was_asked_for_and_is_taken_is_an_error() -> None:
    with listening() as taken:
        wanted = options_of("serve", "demo", "--device", "cpu", "--router-port", "0", "--port", str(taken))
        assert preflight.ports_moved(wanted) == (wanted, [])
        assert ("router port", f"--http-port: port {taken} is taken") in list(preflight.problems(wanted))


def test_a_usual_port_keeps_out_of_the_way_of_one_that_was_asked_for() -> None:
    wanted = options_of("serve", "demo", "--router-port", "8000")
    moved, _ = preflight.ports_moved(wanted)
    assert moved.router_port == 8000
    assert moved.http_port not in (None, 8000)


def test_routers_with_ports_of_their_own_find_as_many_in_a_row() -> None:
    with listening() as taken:
        apart = options_of("serve", "demo", "--routers", "2", "--separate-ports")
        moved, _ = preflight.ports_moved(replace(apart, http_port=taken - 1))
        assert moved.http_port is not None
        assert moved.http_port > taken


@pytest.mark.parametrize("address", [(), ("--address", "10.0.0.1:6379")])
@pytest.mark.parametrize("command", [("serve", "demo"), ("up", "--model", "demo")])
def test_routers_bind_loopback_unless_they_are_told_another_host(
    command: tuple[str, ...], address: tuple[str, ...]
) -> None:
    spec = spec_of(CLUSTER, options_of(*command, *address), ONE_WORKER)
    opened = spec_of(CLUSTER, options_of(*command, *address, "--host", "0.0.0.0"), ONE_WORKER)
    assert (spec.router.host, opened.router.host) == ("127.0.0.1", "0.0.0.0")
    # Of a joined cluster each node says its own; workers are for routers alone, which have the cluster's secret.
    assert opened.router.advertise_host == (None if address else "127.0.0.1")
    assert spec.worker.host == opened.worker.host == ("" if address else "127.0.0.1")


@pytest.mark.parametrize(
    ("host", "bound"), [("::1", "[::1]"), ("[::]", "[::]"), ("0.0.0.0", "0.0.0.0"), ("gpu-1", "gpu-1")]
)
def test_an_ipv6_address_is_bound_in_brackets(host: str, bound: str) -> None:
    assert options_of("serve", "demo", "--host", host).host == bound


@pytest.mark.parametrize("host", ["", "0.0.0.0:8000", "::1:x"])
def test_what_is_no_host_is_refused(host: str) -> None:
    refused = CliRunner().invoke(main, ["serve", "demo", "--host", host])
    assert refused.exit_code == 2
    assert "is an address without port" in refused.output


def test_a_host_of_another_machine_is_refused_before_anything_starts() -> None:
    wanted = options_of("serve", "demo", "--device", "cpu", "--host", "192.0.2.1")
    assert ("router port", "--host 192.0.2.1 is no address of this machine") in list(
        preflight.problems(wanted)
    )


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
    local, opened = options_of("serve", "demo"), options_of("serve", "demo", "--host", "0.0.0.0")
    assert local.exposure is None
    assert opened.exposure is not None
    assert "WHOEVER REACHES 0.0.0.0 MAY CALL EVERYTHING" in opened.exposure
    guarded = replace(opened, security=SecurityOptions(auth_file=str(tmp_path / "tokens.json")))
    assert guarded.exposure == (
        "prompts and tokens go over 0.0.0.0 in plaintext: give --tls-cert and --tls-key"
    )
    tls = ServerTls(cert="c.pem", key="c.key")
    assert replace(guarded, security=replace(guarded.security, tls=tls)).exposure is None


@pytest.mark.parametrize(("text", "told"), [("[]", "has no token"), ("", "it is empty")])
def test_an_auth_file_without_a_token_opens_no_cluster(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "tokens.json"
    file.touch(mode=0o600)
    file.write_text(text)
    wanted = options_of("serve", "demo", "--device", "cpu", "--auth-file", str(file))
    ((subject, detail),) = preflight.problems(wanted)
    assert (subject, told in detail, str(file) in detail) == ("security", True, True)


def test_a_token_file_without_a_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    refused = CliRunner().invoke(main, ["workers", "--router", "127.0.0.1:1", "--token-file", str(file)])
    assert (refused.exit_code, f"token file {file} holds no token" in refused.output) == (2, True)


@pytest.mark.parametrize(
    ("host", "head", "reach"),
    [
        ("127.0.0.1", HEAD, "its API open only to processes on this machine (see --host)"),
        ("127.0.0.1", None, "its API open only to processes on its routers' machine (see --host)"),
        ("0.0.0.0", HEAD, "open to anybody who can reach 0.0.0.0"),
    ],
)
def test_the_first_line_says_who_reaches_it(host: str, head: state.HeadState | None, reach: str) -> None:
    served = replace(CLUSTER, host=host, head=head, num_workers=1)
    for view in (views.summary(served), views.serving(served, options_of("serve", "demo"))):
        assert printed(view)[0] == f"cluster default serves demo on 1 worker, {reach}"


def test_serve_says_how_to_call_it_in_lines_that_a_shell_takes() -> None:
    told = "float32: this CPU has no bfloat16 instructions"
    addresses = replace(CLUSTER, gateways=("127.0.0.1:8000",), routers=("127.0.0.1:50051",))
    served = replace(addresses, dtypes=(told,), cpus_per_worker=2.0)
    lines = printed(views.serving(served, options_of("serve", "demo", "--served-model-name", "it's", "b")))
    assert f"data type  {told}" in lines
    assert "CPUs       2 for each worker (see --cpus-per-worker)" in lines
    assert not any(line.startswith("CPUs") for line in printed(views.summary(addresses)))
    assert "HTTP       http://127.0.0.1:8000/v1" in lines
    assert "gRPC       127.0.0.1:50051" in lines
    assert "alias      b" in lines
    at = lines.index("try:")
    words = shlex.split("\n".join(lines[at + 1 : at + 4]))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    assert max(map(len, lines[at : at + 4])) <= 80


def test_serve_shows_how_to_embed_where_the_model_is_an_embedding_model(tmp_path: Path) -> None:
    (tmp_path / MODULES_FILE).write_text("[]")
    served = replace(CLUSTER, gateways=("127.0.0.1:8000",))
    text = "\n".join(printed(views.serving(served, options_of("serve", str(tmp_path)))))
    assert "curl http://127.0.0.1:8000/v1/embeddings" in text
    assert "max_tokens" not in text


def test_a_call_of_a_guarded_cluster_shows_its_token_and_trusts_its_ca() -> None:
    security = SecurityOptions(auth_file="tokens.json", tls=ServerTls(cert="c.pem", key="c.key"))
    options = replace(options_of("serve", "demo"), security=security)
    text = "\n".join(printed(views.serving(replace(CLUSTER, gateways=("127.0.0.1:8000",)), options)))
    assert "curl https://127.0.0.1:8000/v1/completions" in text
    assert {"    --cacert CA.pem \\", '    -H "Authorization: Bearer $BLOCKYARD_TOKEN" \\'} <= set(
        text.splitlines()
    )


@pytest.mark.parametrize(
    ("model", "chosen", "names"),
    [
        ("Qwen/Qwen3-0.6B", (), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")),
        ("gpt2", (), ("gpt2",)),
        ("/models/llama", (), ("llama",)),
        ("Qwen/Qwen3-0.6B", ("a", "b", "a"), ("a", "b")),
    ],
)
def test_a_hub_model_has_its_full_name_and_its_short_one(
    model: str, chosen: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert model_names(model, chosen) == names


def test_a_folder_is_named_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_names("models/mine") == ("mine",)


def test_the_model_is_named_by_an_argument_an_option_or_a_file_and_must_be_named(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[engine]\nmodel = "demo"\n', encoding="utf-8")
    for arguments in (("demo",), ("--model", "demo"), ("--config", str(file))):
        assert options_of("serve", *arguments).served_names == ("demo",)
    refused = CliRunner().invoke(main, ["serve"])
    assert (refused.exit_code, "Missing argument 'MODEL'." in refused.output) == (2, True)


def test_an_empty_name_is_refused() -> None:
    refused = CliRunner().invoke(main, ["serve", "demo", "--served-model-name", ""])
    assert (refused.exit_code, "a model's name must not be empty" in refused.output) == (2, True)


def test_a_shared_port_may_be_one_of_ipv6() -> None:
    with (
        reserved_port("[::1]", 0) as port,
        socket.create_server(("::1", port), family=socket.AF_INET6, reuse_port=True),
    ):
        assert not can_bind("[::1]", port)
    assert can_bind("[::1]", port)


def test_serve_ends_where_another_command_has_taken_the_cluster_down() -> None:
    lifecycle.wait_for_end(CLUSTER)
    state.save(replace(CLUSTER, identity="of another start"))
    lifecycle.wait_for_end(CLUSTER)


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


def test_serve_says_where_its_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "END_LOOK_SECONDS", 0.0)
    state.save(CLUSTER)
    with pytest.raises(RuntimeError, match="Ray has ended"):
        lifecycle.wait_for_end(CLUSTER)


def test_a_demo_that_may_stay_is_where_the_examples_look_for_it() -> None:
    staying, passing = demo_options(may_stay=True), demo_options(may_stay=False)
    assert {name: getattr(staying, name) for name in SERVE_PORTS} == SERVE_PORTS
    assert staying.movable_ports == SERVE_PORTS.keys()
    assert {name: getattr(passing, name) for name in UP_PORTS} == UP_PORTS


def test_a_dry_run_tells_the_ports_that_it_would_take_and_warns_of_strangers() -> None:
    with listening() as taken:
        result = CliRunner().invoke(
            main,
            ["serve", "demo", "--device", "cpu", "--host", "0.0.0.0", "--dry-run", "--output", "json"],
            env={"BLOCKYARD_UP_ROUTER_PORT": str(taken)},
        )
    plan = json.loads(result.stdout)
    (router,) = plan["routers"]
    assert router.startswith(f"0.0.0.0, port {taken}, HTTP on port ")
    told = {(finding["verdict"], finding["detail"]) for finding in plan["findings"]}
    assert ("fail", f"--router-port: port {taken} is taken") in told, "a variable asks for it, too"
    assert any(verdict == "warn" and "MAY CALL EVERYTHING" in detail for verdict, detail in told)


def test_a_revision_is_part_of_the_models_name_and_not_of_its_id() -> None:
    for arguments in (("Qwen/Qwen3-0.6B", "--revision", "v1.5"), ("Qwen/Qwen3-0.6B@v1.5",)):
        options = options_of("serve", *arguments)
        assert options.engine.model == "Qwen/Qwen3-0.6B@v1.5"
        assert options.served_names == ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("demo", "--revision", "v1"), "a revision is of a model on the hub"),
        (("a/b@v1", "--revision", "v2"), "names its revision already"),
        (("demo", "--chat-template", "/nowhere"), "cannot be read (FileNotFoundError): /nowhere"),
        (("demo", "--download-dir", "x", "--address", "ray:1"), "--download-dir is a folder of this machine"),
        (("demo", "--tokenizer", "no such/thing/here"), "is no folder here, and no hub name"),
    ],
)
def test_what_names_no_model_is_refused(arguments: tuple[str, ...], why: str) -> None:
    refused = CliRunner().invoke(main, ["serve", *arguments])
    assert (refused.exit_code, why in " ".join(refused.output.split())) == (2, True), refused.output


def test_a_template_comes_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}", encoding="utf-8")
    assert options_of("serve", "demo", "--chat-template", str(file)).chat_template == "{{ messages }}"
    file.write_bytes(b"{" * (MAX_TEMPLATE_BYTES + 1))
    refused = CliRunner().invoke(main, ["serve", "demo", "--chat-template", str(file)])
    assert (refused.exit_code, "is longer than" in refused.output) == (2, True)


def test_the_files_of_a_configuration_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}", encoding="utf-8")
    file = tmp_path / "cluster.toml"
    file.write_text('[cluster]\nchat_template = "chat.jinja"\ndownload_dir = "models"\n', encoding="utf-8")
    options = options_of("serve", "demo", "--config", str(file))
    assert (options.chat_template, options.download_dir) == ("{{ messages }}", str(tmp_path / "models"))
