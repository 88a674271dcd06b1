"""Two worker processes, and a router's session with each by hand.

Owns the processes and the messages. Does not own what is measured.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from blockyard.proto.naming.block_hash import chain, pack_tokens, root_name
from blockyard.proto.security.tls import session_channels
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.admin_pb2 import FlushCacheRequest
from blockyard.proto.v1.cluster_pb2 import WorkerLoad
from blockyard.proto.v1.session_pb2 import EngineSampling, Hello, PullReport, Submit, ToRouter, ToWorker
from blockyard.proto.v1.session_pb2_grpc import EngineServiceStub

from bench.router.processes import SECRET_VARIABLE, free_port

BLOCK_SIZE = 16
START_SECONDS = 180.0
ANSWER_SECONDS = 300.0
ROOT = root_name(cluster_secret="", model_fingerprint="bench", block_size=BLOCK_SIZE, kv_dtype="bench")


@dataclass(slots=True)
class Answer:
    """Result of one request. Times are seconds from the submission."""

    submitted: float
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """Time of each message with tokens."""
    cached_tokens: int = 0
    report: PullReport | None = None
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def first_seconds(self) -> float:
        return self.arrivals[0]


class Worker:
    """One worker process, and the session with it."""

    def __init__(self, name: str, options: Sequence[str], *, secret: str, folder: Path, host: str) -> None:
        self.name = name
        self.hello: Hello
        self.on_load: Callable[[WorkerLoad], object] = lambda load: None
        """Takes each load that the worker reports."""
        self.address = f"{host}:{free_port()}"
        self._answers: dict[int, Answer] = defaultdict(lambda: Answer(time.perf_counter()))
        self._writing = asyncio.Lock()
        self._secret = secret
        self._log = folder / f"{name}.log"
        self._command = [
            sys.executable,
            "-m",
            "blockyard.worker",
            "--worker-id",
            name,
            "--metrics-port",
            "-1",
        ]
        self._command += ["--host", host, "--port", self.address.rpartition(":")[2], *options]
        self._process: subprocess.Popen[bytes]

    def spawn(self, before: Sequence[str] = ()) -> int:
        """Start the process and return its id. `before` is a command that runs it."""
        environment = {**os.environ, SECRET_VARIABLE: self._secret, "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*before, *self._command], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self._process.pid

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Self]:
        """Connect once it serves, and read its messages."""
        async with asyncio.timeout(START_SECONDS):
            while " serves at " not in self._log.read_text(errors="replace"):
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self.name} has ended:\n{self._log.read_text()[-2000:]}")
                await asyncio.sleep(0.1)
        open_channel = session_channels(None, secret=self._secret, cluster="default")
        async with open_channel(self.address) as channel:
            self._stub = EngineServiceStub(channel)
            self._call = self._stub.Session()
            self.hello = (await self._call.read()).hello
            reader = asyncio.create_task(self._read())
            try:
                yield self
            finally:
                reader.cancel()
                self._call.cancel()

    async def _read(self) -> None:
        while isinstance(message := await self._call.read(), ToRouter):
            kind = message.WhichOneof("message")
            if kind in ("step", "pong"):
                self.on_load(getattr(message, kind).load)
            if message.WhichOneof("message") != "step":
                continue
            now, step = time.perf_counter(), message.step
            for report in step.pulls:
                self._answers[report.handle].report = report
            taken = iter(step.token_ids)
            columns = zip(
                step.handles, step.token_counts, step.cached_tokens, step.finish_reasons, strict=True
            )
            for handle, count, cached, finish_reason in columns:
                answer = self._answers[handle]
                answer.tokens += [next(taken) for _ in range(count)]
                answer.arrivals += [now - answer.submitted] * bool(count)
                answer.cached_tokens = cached
                if finish_reason:
                    answer.is_over.set()

    def order(self, num_blocks: int, seconds: float, *, address: str | None = None) -> session_pb2.Pull:
        """Return the order to pull from this worker."""
        return session_pb2.Pull(
            address=address or self.transfer_address,
            incarnation=self.hello.incarnation,
            num_blocks=num_blocks,
            seconds=seconds,
        )

    @property
    def transfer_address(self) -> str:
        return f"{self.address.rpartition(':')[0]}:{self.hello.transfer_port}"

    async def submit(self, tokens: Sequence[int], max_tokens: int, **fields: Any) -> int:
        """Submit a request that ends after exactly `max_tokens`, and return its handle."""
        handle = len(self._answers) + 1
        submit = Submit(
            handle=handle,
            request_id=f"request-{handle}",
            token_ids=pack_tokens(tokens),
            prompt_tokens=len(tokens),
            block_names=b"".join((ROOT, *chain(ROOT, tokens, BLOCK_SIZE))),
            sampling=EngineSampling(temperature=1.0, top_p=1.0, max_tokens=max_tokens, seed=7),
            **fields,
        )
        self._answers[handle] = Answer(time.perf_counter())
        await self._send(ToWorker(submit=submit))
        return handle

    async def _send(self, message: ToWorker) -> None:
        async with self._writing:
            await self._call.write(message)

    async def answer(self, handle: int) -> Answer:
        async with asyncio.timeout(ANSWER_SECONDS):
            await self._answers[handle].is_over.wait()
        return self._answers[handle]

    async def ask(self, tokens: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
        return await self.answer(await self.submit(tokens, max_tokens, **fields))

    def arrivals_of(self, handle: int) -> list[float]:
        """Return the times of a request's messages so far."""
        return self._answers[handle].arrivals

    async def cancel_all(self) -> None:
        """Cancel what runs."""
        for handle, answer in self._answers.items():
            if not answer.is_over.is_set():
                await self._send(ToWorker(cancel=session_pb2.Cancel(handle=handle)))
                answer.is_over.set()

    async def flush(self) -> None:
        """Drop all cached blocks."""
        await self._stub.FlushCache(FlushCacheRequest())


def options_of(model: Path, *, blocks: int, block_bytes: int, host_blocks: int, **more: Any) -> list[str]:
    """Return the options of a worker, on a CPU unless `more` has another device."""
    options: dict[str, Any] = {
        "model": model,
        "device": "cpu",
        "kv-cache-memory": blocks * block_bytes,
        "host-cache-gib": host_blocks * block_bytes / 2**30,
        "lend-share": 0.95,
        "grace-seconds": 0,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


@asynccontextmanager
async def two_workers(
    folder: Path, options: Sequence[str], *, secret: str = ""
) -> AsyncIterator[tuple[Worker, Worker]]:
    """Yield a source and a destination on this machine."""
    pair = [
        Worker(name, options, secret=secret, folder=folder, host="127.0.0.1") for name in ("source", "dest")
    ]
    try:
        for worker in pair:
            worker.spawn()
        async with pair[0].session() as source, pair[1].session() as destination:
            yield source, destination
    finally:
        for worker in pair:
            worker.end()
