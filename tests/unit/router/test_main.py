"""`python -m blockyard.router` as an operator meets it, and the actor that runs a router in a cluster."""

import asyncio
import gc
import socket
import sys
from types import SimpleNamespace

import pytest
from blockyard.router.__main__ import StartError, _config, _parser, main
from blockyard.router.actor import RouterActor
from blockyard.router.server import RouterServer

from .rig import MODEL, config
from .rig import ROUTER as ROUTER


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@h:1/0", "redis://u:hunter2@h", "redis://h?password=hunter2"]
)
def test_a_password_of_redis_comes_by_the_environment_and_not_by_an_argument(url, monkeypatch):
    with pytest.raises(StartError, match="set BLOCKYARD_REDIS_URL instead") as refused:
        _config(_parser().parse_args(["--model", str(MODEL), "--redis-url", url]))
    assert "hunter2" not in str(refused.value)
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", url)
    assert _config(_parser().parse_args(["--model", str(MODEL)])).redis_url == url
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", "redis:/hunter2@h")
    with pytest.raises(StartError, match="this is no Redis URL") as refused:
        _config(_parser().parse_args(["--model", str(MODEL)]))
    assert "hunter2" not in str(refused.value)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `main`, which forbids its process to import torch."""
    monkeypatch.setattr("blockyard.router.__main__.sys", SimpleNamespace(modules={}, stderr=sys.stderr))
    monkeypatch.setattr(sys, "argv", ["router", *arguments])
    return main()


def test_what_stops_a_router_at_its_start_is_one_line_and_exit_1(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("not JSON")
    # A router that shares its port on purpose must not get a part of one that does not, nor the other way round.
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        for arguments, told in (
            (["--model", str(tmp_path)], str(tmp_path)),
            (["--model", str(tmp_path / "nowhere")], str(tmp_path / "nowhere")),
            (
                ["--model", str(MODEL), "--port", f"{port}"],
                f"cannot listen on 127.0.0.1:{port}: is the port taken?",
            ),
            (
                ["--model", str(MODEL), "--tenant-weight", "research=0"],
                "a tenant's weight must be from 0.001 to 1000, not 0 for 'research'",
            ),
        ):
            assert run(monkeypatch, *arguments) == 1
            log = capsys.readouterr().err
            assert "Traceback" not in log
            assert log.splitlines()[-1].startswith("blockyard.router: ")
            assert told in log.splitlines()[-1]


def test_a_router_whose_background_work_fails_exits_1(monkeypatch, caplog):
    """An address that gRPC cannot encode ends the link with an unexpected error."""
    assert run(monkeypatch, "--model", str(MODEL), "--worker", "\udcff:1") == 1
    (fatal,) = (
        one for one in caplog.records if one.name == "blockyard.router.server" and one.levelname == "CRITICAL"
    )
    assert "the router has failed" in fatal.message


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--port", "99999", "--port must be from 0 to 65535, not 99999"),
        ("--port", "-1", "--port must be from 0 to 65535, not -1"),
        ("--grace-seconds", "-1", "--grace-seconds must be finite and not negative, not -1"),
        ("--grace-seconds", "nan", "--grace-seconds must be finite and not negative, not nan"),
        ("--worker", "127.0.0.1", "--worker must be HOST:PORT, such as 127.0.0.1:50061, not '127.0.0.1'"),
        ("--worker", "a:b", "--worker must be HOST:PORT, such as 127.0.0.1:50061, not 'a:b'"),
        ("--worker", ":50061", "--worker must be HOST:PORT, such as 127.0.0.1:50061, not ':50061'"),
        ("--worker", "a:0", "--worker must be HOST:PORT, such as 127.0.0.1:50061, not 'a:0'"),
        ("--worker", "a:65536", "--worker must be HOST:PORT, such as 127.0.0.1:50061, not 'a:65536'"),
    ],
)
def test_an_option_that_makes_no_sense_is_told_by_name_before_anything_starts(option, value, told):
    with pytest.raises(StartError) as refusal:
        _config(_parser().parse_args(["--model", "nowhere", option, value]))
    assert str(refusal.value) == told


def test_the_last_port_and_addresses_of_ipv6_are_taken() -> None:
    given = ["--model", "nowhere", "--port", "65535", "--worker", "[::1]:65535", "--grace-seconds", "0"]
    taken = _config(_parser().parse_args(given))
    assert (taken.port, taken.workers) == (65535, ("[::1]:65535",))


async def test_only_a_server_that_owns_its_process_sets_the_garbage_collector() -> None:
    for owns_process in (False, True):
        before = gc.get_threshold()
        server = RouterServer(config(), owns_process=owns_process)
        try:
            await server.start()
            assert (gc.get_freeze_count() > 0, gc.get_threshold() != before) == (owns_process, owns_process)
        finally:
            await server.stop(0.0)
        assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


def leads() -> None:
    """Confirm the epoch of whoever calls."""


async def test_an_actor_whose_router_fails_says_so() -> None:
    actor = RouterActor(config(), "router-0", "supervisor", leads)
    waiting = asyncio.create_task(actor.until_stopped())
    await actor._server.start()
    assert not waiting.done()
    await actor.set_workers({"demo": ["\udcff:1"]}, actor._server.models, 1)
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="its log says why"):
            await waiting
        await actor.stop(0.0, leads)


async def test_an_actor_heeds_no_supervisor_that_another_one_has_superseded() -> None:
    def superseded() -> None:
        raise RuntimeError("epoch 2 leads now")

    with pytest.raises(RuntimeError, match="epoch 2"):
        RouterActor(config(), "router-0", "supervisor", superseded)
    actor = RouterActor(config(), "router-0", "supervisor", leads)
    await actor._server.start()
    told: list[object] = []
    actor._server.set_workers = lambda addresses, model: told.append(addresses)
    for epoch in (1, 2, 1):
        await actor.set_workers({"demo": [f"10.0.0.{epoch}:1"]}, actor._server.models, epoch)
    assert told == [["10.0.0.1:1"], ["10.0.0.2:1"]]
    for call in (actor.stop, lambda *rest: actor.set_models(actor._server.models, *rest)):
        with pytest.raises(RuntimeError, match="epoch 2"):
            await call(0.0, superseded)
    await actor.stop(0.0, leads)
