"""What stands between client and workers in the router benchmark: our router's processes, sglang-router, or nothing.

Owns how each is started and when it is ready. A `System` is what a trial needs to know of one way to the workers.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
from blockyard.router.__main__ import REDIS_URL_VARIABLE
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.router.load import Ask, http_client, router_client, session_client
from bench.router.processes import ROOT, SECRET_VARIABLE, Workers, free_port, running_server

OURS, SESSION = "Blockyard", "engine session, direct"
PLAINTEXT = "Blockyard, sessions in plaintext"
"""Ours without the cluster secret, to tell what TLS between router and workers costs."""
BEFORE = "Blockyard of an earlier commit"
"""Router and workers of another checkout, without a cluster secret."""
SGLANG, HTTP = "sglang-router", "HTTP worker, direct"
CHECK_SECONDS = 1.0
POLL_SECONDS = 0.02
LOG_SECONDS = 10.0
"""By then a router has logged what its signal asks for."""
LATENESS = re.compile(r"event loop: .* longest pause ([\d.]+) ms, computing ([\d.]+) ms")
CHECKS_A_PROCESS = 8
"""Fresh connections that must all find a router that serves: the kernel deals them out among the processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    name: str
    client: Callable[[int], AbstractAsyncContextManager[Ask]]
    """For requests of so many tokens."""
    workers: Workers
    pids: tuple[int, ...] = ()
    """The router's processes: what CPU time is measured of."""
    address: str = ""
    """Of our router."""
    log: Path | None = None
    """Where ours says how late its event loop was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The longest of an event loop since it was last asked, in milliseconds."""

    late: float
    """By how much a tick came too late, for whatever reason."""
    computing: float
    """What of it the loop's own thread computed."""


async def take_stall(system: System) -> Stall | None:
    """None for a system without such a log. SIGUSR1 has our router log its watch and begin anew."""
    if system.log is None:
        return None
    known = len(_stalls(system.log))
    os.kill(system.pids[0], signal.SIGUSR1)
    async with asyncio.timeout(LOG_SECONDS):
        while True:
            await asyncio.sleep(POLL_SECONDS)
            stalls = _stalls(system.log)
            if len(stalls) > known:
                return stalls[-1]


def _stalls(log: Path) -> list[Stall]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return [Stall(late=float(late), computing=float(computing)) for late, computing in LATENESS.findall(text)]


@asynccontextmanager
async def our_router(
    model: str,
    workers: Workers,
    prompt: Callable[[int], str],
    folder: Path,
    redis_url: str | None,
    *,
    num_processes: int = 1,
) -> AsyncIterator[System]:
    address = f"127.0.0.1:{free_port()}"
    log = folder / "router.log"
    command = [
        sys.executable,
        "-m",
        "blockyard.router",
        "--model",
        model,
        "--port",
        address.rpartition(":")[2],
    ]
    command += [part for worker in workers.addresses for part in ("--worker", worker)]
    command += ["--loop-tick-seconds", "0.001"]
    command += ["--reuse-port"] if num_processes > 1 else []

    async def is_ready() -> bool:
        return all([await _serves(address) for _ in range(CHECKS_A_PROCESS * num_processes)])

    async with AsyncExitStack() as stack:
        pids = [
            await stack.enter_async_context(
                running_server(
                    command,
                    log if number == 0 else log.with_suffix(f".{number}.log"),
                    is_ready,
                    {SECRET_VARIABLE: workers.secret}
                    | ({} if redis_url is None else {REDIS_URL_VARIABLE: redis_url}),
                    workers.root,
                )
            )
            for number in range(num_processes)
        ]
        yield System(
            name=_name(workers, num_processes),
            client=lambda num_tokens: router_client(address, prompt, num_tokens),
            workers=workers,
            pids=tuple(pids),
            address=address,
            log=log,
        )


def _name(workers: Workers, num_processes: int) -> str:
    if num_processes > 1:
        return f"{OURS}, {num_processes} processes"
    if workers.root != ROOT:
        return BEFORE
    return OURS if workers.secret else PLAINTEXT


async def _serves(address: str) -> bool:
    own_pool = (("grpc.use_local_subchannel_pool", 1),)
    request = health_pb2.HealthCheckRequest()
    async with grpc.aio.insecure_channel(address, options=own_pool) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=CHECK_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def engine_session(workers: Workers, prompt_ids: Sequence[int]) -> System:
    """No router at all: one engine session straight to a worker."""
    return System(
        name=SESSION,
        client=lambda num_tokens: session_client(
            workers.addresses[0], prompt_ids, num_tokens, secret=workers.secret
        ),
        workers=workers,
    )


@asynccontextmanager
async def sglang_router(
    python: Path, workers: Workers, prompt: Callable[[int], str], folder: Path
) -> AsyncIterator[System]:
    port = free_port()
    address = f"127.0.0.1:{port}"
    options = {
        "host": "127.0.0.1",
        "port": str(port),
        "prometheus-port": str(free_port()),
        "policy": "cache_aware",
        "log-level": "warn",
    }
    command = [str(python), "-m", "sglang_router.launch_router"]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    command += ["--worker-urls", *(f"http://{worker}" for worker in workers.addresses)]

    async def is_ready() -> bool:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{address}/readiness") as answer,
            ):
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async with running_server(command, folder / "sglang-router.log", is_ready, {}) as pid:
        yield System(
            name=SGLANG,
            client=lambda num_tokens: http_client(address, prompt, num_tokens),
            workers=workers,
            pids=(pid,),
        )


def http_worker(workers: Workers, prompt: Callable[[int], str]) -> System:
    """No router at all: HTTP straight to a worker."""
    return System(
        name=HTTP,
        client=lambda num_tokens: http_client(workers.addresses[0], prompt, num_tokens),
        workers=workers,
    )
