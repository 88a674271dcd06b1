"""`python -m blockyard.router` from an operator's shell."""

import asyncio
import gc
import os
import re
import signal
import socket
import sys
from pathlib import Path

import grpc
import pytest
from blockyard.proto.v1.inference_pb2_grpc import InferenceServiceStub
from blockyard.router.__main__ import StartError, _config, _parser
from blockyard.router.server import RouterServer

from .fake_worker import SECRET, expected_tokens
from .rig import MODEL, config, request, worker_of_model

START_SECONDS = 30.0
ROUTER = (sys.executable, "-m", "blockyard.router")


async def read_address(process: asyncio.subprocess.Process) -> str:
    """From the log line that says where the router serves."""
    assert process.stderr is not None
    async with asyncio.timeout(START_SECONDS):
        while line := (await process.stderr.readline()).decode():
            if found := re.search(r"router serving \S+ on (\S+)", line):
                return found[1]
    raise AssertionError("the router ended before it served")


async def test_sigterm_lets_a_running_stream_finish_and_exits_0() -> None:
    async with worker_of_model("a") as worker:
        process = await asyncio.create_subprocess_exec(
            *(*ROUTER, "--model", str(MODEL), "--worker", worker.address),
            env={**os.environ, "BLOCKYARD_CLUSTER_SECRET": SECRET},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with grpc.aio.insecure_channel(await read_address(process)) as channel:
                wanted = request(prompt="hunter2", sampling={"max_tokens": 200})
                stream = InferenceServiceStub(channel).GenerateStream(wanted, wait_for_ready=True)
                tokens: list[int] = []
                async for message in stream:
                    if not tokens:
                        process.send_signal(signal.SIGTERM)
                    tokens += message.delta.token_ids
                assert tokens == expected_tokens(1, 200)
            async with asyncio.timeout(10):
                _, log = await process.communicate()
            assert process.returncode == 0
            assert b"Traceback" not in log
            assert b"hunter2" not in log
            assert SECRET.encode() not in log
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@h:1/0", "redis://u:hunter2@h", "redis://h?password=hunter2"]
)
def test_a_password_of_redis_comes_by_the_environment_and_not_by_an_argument(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartError, match="set BLOCKYARD_REDIS_URL instead") as refused:
        _config(_parser().parse_args(["--model", str(MODEL), "--redis-url", url]))
    assert "hunter2" not in str(refused.value)
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", url)
    assert _config(_parser().parse_args(["--model", str(MODEL)])).redis_url == url
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", "redis:/hunter2@h")
    with pytest.raises(StartError, match="this is no Redis URL") as refused:
        _config(_parser().parse_args(["--model", str(MODEL)]))
    assert "hunter2" not in str(refused.value)


async def run(*arguments: str | bytes) -> tuple[int | None, str]:
    """A router that is to end by itself: its exit code and log."""
    process = await asyncio.create_subprocess_exec(*ROUTER, *arguments, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(START_SECONDS):
            _, log = await process.communicate()
        return process.returncode, log.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_folder_that_is_no_model_is_one_line_and_exit_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("not JSON")
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, log = await run("--model", str(folder))
        assert code == 1
        assert "Traceback" not in log
        assert log.splitlines()[-1].startswith("blockyard.router: ")
        assert str(folder) in log.splitlines()[-1]


async def test_a_taken_port_is_one_line_and_exit_1() -> None:
    # Whoever shares a port on purpose must not get a part of one that does not, nor the other way round.
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        code, log = await run("--model", str(MODEL), "--port", str(port))
    assert code == 1
    assert "Traceback" not in log
    assert log.splitlines()[-1] == f"blockyard.router: cannot listen on 127.0.0.1:{port}: is the port taken?"


async def test_a_limit_that_makes_no_sense_is_one_line_and_exit_1() -> None:
    code, log = await run("--model", str(MODEL), "--tenant-weight", "research=0")
    assert code == 1
    assert log.splitlines() == [
        "blockyard.router: a tenant's weight must be from 0.001 to 1000, not 0 for 'research'"
    ]


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
def test_an_option_that_makes_no_sense_is_told_by_name_before_anything_starts(
    option: str, value: str, told: str
) -> None:
    with pytest.raises(StartError) as refusal:
        _config(_parser().parse_args(["--model", "nowhere", option, value]))
    assert str(refusal.value) == told


def test_the_last_port_and_addresses_of_ipv6_are_taken() -> None:
    given = ["--model", "nowhere", "--port", "65535", "--worker", "[::1]:65535", "--grace-seconds", "0"]
    taken = _config(_parser().parse_args(given))
    assert (taken.port, taken.workers) == (65535, ("[::1]:65535",))


@pytest.mark.ci
async def test_two_routers_share_a_port_and_tell_how_late_their_loops_were() -> None:
    async with worker_of_model("a") as worker:
        command = (*ROUTER, "--model", str(MODEL), "--worker", worker.address, "--reuse-port")
        environment = {**os.environ, "BLOCKYARD_CLUSTER_SECRET": SECRET}
        processes: list[asyncio.subprocess.Process] = []
        try:
            port = "0"
            for _ in range(2):
                process = await asyncio.create_subprocess_exec(
                    *command, "--port", port, env=environment, stderr=asyncio.subprocess.PIPE
                )
                processes.append(process)
                port = (await read_address(process)).rpartition(":")[2]
            for process in processes:
                process.send_signal(signal.SIGUSR1)
                assert process.stderr is not None
                async with asyncio.timeout(10):
                    while b"ticks late" not in (line := await process.stderr.readline()):
                        assert line, "it ended"
                process.terminate()
                async with asyncio.timeout(10):
                    _, rest = await process.communicate()
                assert process.returncode == 0
                assert b"router stopped; event loop: " in rest
                assert b"leaked" not in rest
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


@pytest.mark.ci
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


async def test_a_router_whose_background_work_fails_exits_1() -> None:
    """An address that gRPC cannot encode ends the link with an unexpected error."""
    code, log = await run("--model", str(MODEL), "--worker", b"\xff:1")
    assert code == 1
    assert "CRITICAL" in log
    assert "the router has failed" in log


def leads() -> None:
    """Confirm the epoch of whoever calls."""


async def test_an_actor_whose_router_fails_says_so() -> None:
    from blockyard.router.actor import RouterActor

    actor = RouterActor(config(), "router-0", "supervisor", leads)
    waiting = asyncio.create_task(actor.until_stopped())
    await actor._server.start()
    assert not waiting.done()
    await actor.set_workers({"demo": ["\udcff:1"]}, actor._server.models, 1)
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="its log says why"):
            await waiting
        await actor.stop(0.0, leads)


@pytest.mark.ci
async def test_an_actor_heeds_no_supervisor_that_another_one_has_superseded() -> None:
    from blockyard.router.actor import RouterActor

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
