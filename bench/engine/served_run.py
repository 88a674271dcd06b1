"""Our engine through the cluster's path, as a system under test: a real worker, a real router and gRPC requests.

    python -m bench.engine.served_run

See peers/protocol.py. Uses neither Ray nor Redis, since tokens pass through neither. The worker chooses its kernel
backend itself. With `session_tls`, both processes have a cluster secret, and so certificates, as in a cluster of `up`.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from blockyard.router.client import AsyncClient, BlockyardError

from bench.engine.peers.protocol import Course, Loaded, Request, Settings, serve
from bench.router.processes import SECRET_VARIABLE, free_port

START_SECONDS = 180.0
TIMEOUT_SECONDS = 3600.0


def load(children: ExitStack, settings: Settings) -> Loaded:
    folder = Path(tempfile.mkdtemp(prefix="blockyard-bench-"))
    worker, router = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    environment = {**os.environ, SECRET_VARIABLE: token_hex(32) if settings["session_tls"] else ""}
    start = partial(_start, children, folder, environment)
    start("worker", worker, *_worker_options(settings))
    start("router", router, "--model", settings["model"], "--worker", worker, "--grace-seconds", "0")
    asyncio.run(_until_it_answers(router, folder))
    versions = {"torch": torch.__version__}
    return Loaded(lambda requests: asyncio.run(_run(router, requests)), versions, "router, session, client")


def _worker_options(settings: Settings) -> list[str]:
    options: dict[str, Any] = {
        "model": settings["model"],
        "device": settings["device"],
        "dtype": settings["dtype"],
        "kv-cache-dtype": settings.get("kv_cache_dtype", "auto"),
        "kv-cache-memory": settings["kv_bytes"],
        "max-model-len": settings["max_model_len"],
        "max-num-seqs": settings["max_num_seqs"],
        "metrics-port": -1,
        "grace-seconds": 0,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def _start(
    children: ExitStack, folder: Path, env: dict[str, str], kind: str, address: str, *options: str
) -> None:
    command = [sys.executable, "-m", f"blockyard.{kind}", "--port", address.rpartition(":")[2], *options]
    with (folder / f"{kind}.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    children.callback(process.terminate)


async def _until_it_answers(router: str, folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with AsyncClient(router, timeout_seconds=START_SECONDS, retries=0) as client:
        while True:
            try:
                await client.generate(prompt_token_ids=[10, 11, 12], max_tokens=2, ignore_eos=True)
                return
            except BlockyardError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the cluster does not answer: {error}\n{_logs(folder)}") from error
                await asyncio.sleep(0.5)


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-1000:] for path in folder.glob("*.log"))


async def _run(router: str, requests: Sequence[Request]) -> list[Course]:
    async with AsyncClient(router, timeout_seconds=TIMEOUT_SECONDS, retries=0) as client:
        started = time.perf_counter()
        return await asyncio.gather(*(_ask(client, request, started) for request in requests))


async def _ask(client: AsyncClient, request: Request, started: float) -> Course:
    await asyncio.sleep(max(0.0, request.arrival_seconds - (time.perf_counter() - started)))
    course = Course(submitted=request.arrival_seconds)
    deltas = client.stream(
        prompt_token_ids=request.token_ids, max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True
    )
    async for delta in deltas:
        if delta.token_ids:
            course.take(list(delta.token_ids), time.perf_counter() - started)
    return course


if __name__ == "__main__":
    # If the benchmark is killed, stdin ends. This process then ends the worker and the router.
    with ExitStack() as stack:
        serve(partial(load, stack))
