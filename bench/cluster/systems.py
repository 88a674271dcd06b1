"""Systems of the benchmark: our cluster by its real command, and vLLM servers behind sglang-router.

Owns starting and ending them, and the role of each of their processes. All serve OpenAI's API.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from blockyard.deploy.machine import state
from blockyard.deploy.machine.processes import command_of, session_members

from bench.cluster.usage import Processes
from bench.engine.systems import end_group, openmp_of, tcmalloc
from bench.router.processes import ROOT, free_port, tree

OURS = "blockyard"
POLICIES = ("cache_aware", "round_robin")
MODEL = "bench"
CLUSTER = "bench"
NUM_WORKERS = 2
START_SECONDS = 400.0
POLL_SECONDS = 0.2
RAY = "ray"
_ROLES = {
    "ray::WorkerActor": "workers",
    "ray::RankActor": "workers",
    "ray::RouterActor": "router",
    "ray::Supervisor": "supervisor",
    "blockyard.router.tokenizing": "tokenizer",
    "blockyard.worker.grammar": "workers",
}
"""Roles of our processes, by a part of their command lines. Every other process of the head's session is Ray's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings that all systems share."""

    model: Path
    dtype: str
    max_model_len: int
    kv_gib: int
    """Size of the KV cache of each worker."""
    folder: Path
    """Folder for logs and for our cluster's home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system that serves."""

    name: str
    url: str
    processes: Processes
    notes: str = ""


class StartError(RuntimeError):
    """A system did not start. The message ends with the end of its log."""


@asynccontextmanager
async def our_cluster(settings: Settings, *options: str) -> AsyncIterator[System]:
    """Start our cluster with `blockyard up`: Ray's head, Redis, workers of one core each, and a router with HTTP."""
    home = settings.folder / "home"
    environment = {**os.environ, state.HOME_VARIABLE: str(home)}
    command = {
        "model": str(settings.model),
        "model-name": MODEL,
        "dtype": settings.dtype,
        "workers": str(NUM_WORKERS),
        "cpus-per-worker": "1",
        "kv-cache-memory": f"{settings.kv_gib}GiB",
        "max-model-len": str(settings.max_model_len),
        "router-port": "0",
        "http-port": "0",
        "output": "json",
    }
    words = [part for name, value in command.items() for part in (f"--{name}", value)]
    answer = json.loads(
        await _blockyard(environment, "up", *words, *options)
    )  # It undoes a start that fails.
    try:
        yield System(name=OURS, url=f"http://{answer['gateways'][0]}", processes=lambda: _our_processes(home))
    finally:
        await _blockyard(environment, "down", "--drain", "0")


async def _blockyard(environment: Mapping[str, str], *words: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "blockyard.deploy.cli", *words, "--cluster", CLUSTER),
        cwd=ROOT,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode:
        raise StartError(f"`blockyard {words[0]}` failed: {errors.decode(errors='replace')[-3000:]}")
    return output


def _our_processes(home: Path) -> dict[int, str]:
    document = json.loads((home / f"{CLUSTER}.json").read_text(encoding="utf-8"))
    members = session_members(document["head"]["session"])
    roles = {member.pid: our_role(command_of(member.pid)) for member in members}
    return {**roles, document["redis"]["process"]["pid"]: "redis"}


def our_role(command: Sequence[str]) -> str:
    """Return the role of a process of our head's session."""
    line = " ".join(command)
    return next((role for part, role in _ROLES.items() if part in line), RAY)


@asynccontextmanager
async def vllm_servers(settings: Settings, python: Path) -> AsyncIterator[list[tuple[str, int]]]:
    """Start vLLM's OpenAI servers, each on one core. Yield the URL and the process id of each."""
    async with AsyncExitStack() as stack:
        ports = [free_port() for _ in range(NUM_WORKERS)]
        pids = [
            await stack.enter_async_context(
                _running(
                    [str(python), "-m", "vllm.entrypoints.openai.api_server", *_vllm_words(settings, port)],
                    settings.folder / f"vllm-{core}.log",
                    f"http://127.0.0.1:{port}/health",
                    _vllm_environment(settings, python, core),
                )
            )
            for core, port in enumerate(ports)
        ]
        yield [(f"http://127.0.0.1:{port}", pid) for port, pid in zip(ports, pids, strict=True)]


def _vllm_words(settings: Settings, port: int) -> list[str]:
    return [
        *(
            "--model",
            str(settings.model),
            "--served-model-name",
            MODEL,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *("--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len), "--max-num-seqs", "256"),
        "--enable-prompt-tokens-details",
    ]


def _vllm_environment(settings: Settings, python: Path, core: int) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(filter(None, (tcmalloc(), openmp_of(python)))),
        "PYTHONPATH": "",
    }


@asynccontextmanager
async def behind_sglang(
    settings: Settings, python: Path, servers: Sequence[tuple[str, int]], policy: str
) -> AsyncIterator[System]:
    """Start sglang-router before servers of OpenAI's API."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    words += [
        "--policy",
        policy,
        "--log-level",
        "warn",
        "--worker-urls",
        *(address for address, _ in servers),
    ]
    command = [str(python), "-m", "sglang_router.launch_router", *words]
    log = settings.folder / f"sglang-{policy}.log"
    async with _running(command, log, f"{url}/readiness", {"PYTHONPATH": ""}) as router:
        yield System(
            name=f"vllm, sglang-router {policy}",
            url=url,
            processes=lambda: _peer_processes(router, [pid for _, pid in servers]),
        )


def _peer_processes(router: int, servers: Sequence[int]) -> dict[int, str]:
    roles = dict.fromkeys(tree(router), "router")
    for server in servers:
        for pid in tree(server):
            roles[pid] = "workers" if "VLLM::" in "".join(command_of(pid)[:1]) else "API servers"
    return roles


@asynccontextmanager
async def _running(
    command: Sequence[str], log: Path, ready_url: str, environment: Mapping[str, str]
) -> AsyncIterator[int]:
    """Start a server in a process group of its own, and yield its process id once it is ready."""
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=log.parent,
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        async with aiohttp.ClientSession() as session:
            while not await _answers(session, ready_url):
                if process.returncode is not None or time.monotonic() > deadline:
                    raise StartError(f"{Path(command[0]).name} did not become ready:\n{_tail(log)}")
                await asyncio.sleep(POLL_SECONDS)
        yield process.pid
    finally:
        await end_group(process)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
