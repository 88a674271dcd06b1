"""Systems between client and workers in the router benchmark: our router, sglang-router, or none.

Owns starting them, and waiting until they are ready. A `System` holds what a trial needs for one way to the workers.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import grpc
from blockyard.router.__main__ import REDIS_URL_VARIABLE
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.router.load import Ask, http_client, openai_client, router_client, session_client
from bench.router.processes import ROOT, SECRET_VARIABLE, Workers, free_port, running_server

OURS, SESSION = "Blockyard", "engine session, direct"
PLAINTEXT = "Blockyard, sessions in plaintext"
"""Ours without a cluster secret, to show the cost of TLS between router and workers."""
BEFORE = "Blockyard of an earlier commit"
"""Router and workers of another checkout, without a cluster secret."""
OVER_HTTP = "{}, over HTTP"
"""Name of a router of ours whose clients use OpenAI's API."""
SGLANG, HTTP = "sglang-router", "HTTP worker, direct"
CHECK_SECONDS = 1.0
POLL_SECONDS = 0.02
LOG_SECONDS = 10.0
"""Time limit for a router to log its stalls after the signal."""
LATENESS = re.compile(r"event loop: .* longest pause ([\d.]+) ms, computing ([\d.]+) ms")
CHECKS_A_PROCESS = 8
"""New connections per process that must all reach a serving router. The kernel distributes them among the processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    name: str
    client: Callable[[int], AbstractAsyncContextManager[Ask]]
    """Makes a client for requests with this number of output tokens."""
    workers: Workers
    pids: tuple[int, ...] = ()
    """Process ids of the router, whose CPU time is measured. Empty without a router."""
    address: str = ""
    """Address of our router."""
    http_address: str = ""
    """Address of our router's HTTP gateway."""
    log: Path | None = None
    """Log in which our router reports the stalls of its event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Longest stall of an event loop since the last query, in milliseconds."""

    late: float
    """Delay of a tick, for any reason."""
    computing: float
    """Part of it in which the loop's own thread computed."""


async def take_stall(system: System) -> Stall | None:
    """Return the longest stall since the last call, or None for a system without such a log.

    SIGUSR1 makes our router log its longest stall and reset it.
    """
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
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[System]:
    address, http_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    log = folder / "router.log"
    command = [
        sys.executable,
        "-m",
        "blockyard.router",
        "--model",
        model,
        "--port",
        address.rpartition(":")[2],
        "--http-port",
        http_address.rpartition(":")[2],
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
                    | dict(environment or {})
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
            http_address=http_address,
            log=log,
        )


def over_http(system: System, prompt: Callable[[int], str]) -> System:
    """Return our router as clients of OpenAI's API use it."""
    return replace(
        system,
        name=OVER_HTTP.format(system.name),
        client=lambda num_tokens: openai_client(system.http_address, prompt, num_tokens),
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
    """Return a system without a router: one engine session directly to a worker."""
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
    """Return a system without a router: HTTP directly to a worker."""
    return System(
        name=HTTP,
        client=lambda num_tokens: http_client(workers.addresses[0], prompt, num_tokens),
        workers=workers,
    )
