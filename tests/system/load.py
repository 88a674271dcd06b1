"""Streams through the real client, and a record of each: tokens, when they came, how it ended.

Owns the load and the waiting for states. Does not own faults or what must hold (invariants.py).
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient
from blockyard.router.client.errors import BlockyardError
from blockyard.router.client.results import Finish

from tests.pauses import Pauses, watched_pauses

CANARY = "canary-7f3a"
"""Part of every prompt: a log that contains it contains a prompt."""
TIMEOUT_SECONDS = 60.0
READY = cluster_pb2.WORKER_STATE_READY


@dataclass(slots=True, kw_only=True)
class Stream:
    """One call, from its beginning to its only end."""

    request_id: str
    prompt: str
    arguments: dict[str, Any]
    timeout_seconds: float = TIMEOUT_SECONDS
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    arrivals: list[float] = field(default_factory=list)
    """Time at which each piece came."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Tokens by output."""
    text: dict[int, str] = field(default_factory=dict)
    finish: Finish | None = None
    """Finish of the output that ended last."""
    error: BlockyardError | None = None
    pauses: Pauses = field(default_factory=Pauses)
    """Pauses of this process meanwhile."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def code(self) -> grpc.StatusCode:
        assert self.ended is not None, "it has not ended"
        return grpc.StatusCode.OK if self.error is None else self.error.code

    @property
    def reason(self) -> str:
        return "" if self.error is None else self.error.reason

    @property
    def own_pause_seconds(self) -> float:
        """Time for which this process stood still while the call ran."""
        assert self.ended is not None, "it has not ended"
        return self.pauses.seconds(self.started, self.ended)

    def longest_gap(self, since: float) -> float:
        """Return the longest pause between two pieces of which the later came after `since`."""
        times = [self.started, *self.arrivals]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times) if later > since]
        return max(gaps, default=0.0)

    async def until_tokens(self, num_tokens: int) -> None:
        """Wait for that many tokens. Raises AssertionError if the stream ends before."""
        while self.num_tokens < num_tokens:
            assert self.ended is None, f"ended after {self.num_tokens} tokens: {self.error}"
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), TIMEOUT_SECONDS)

    async def run(self, client: AsyncClient) -> None:
        """Take the whole stream. An error is kept, not raised."""
        try:
            deltas = client.stream(
                self.prompt,
                request_id=self.request_id,
                timeout_seconds=self.timeout_seconds,
                **self.arguments,
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    self.arrivals.append(time.monotonic())
                    self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
                    self.text[delta.index] = self.text.get(delta.index, "") + delta.text
                    self.finish = delta.finish or self.finish
                    self._news.set()
        except BlockyardError as error:
            self.error = error
        finally:
            self.ended = time.monotonic()
            self._news.set()


class Load:
    """Streams that run beside the test. Made by `load()`."""

    def __init__(self, client: AsyncClient, tasks: asyncio.TaskGroup, pauses: Pauses) -> None:
        self.pauses = pauses
        self._client = client
        self._tasks = tasks
        self._runs: list[asyncio.Task[None]] = []
        self.streams: list[Stream] = []

    def start(self, stream: Stream) -> Stream:
        stream.started, stream.pauses = time.monotonic(), self.pauses
        self.streams.append(stream)
        self._runs.append(self._tasks.create_task(stream.run(self._client)))
        return stream

    def cancel(self, stream: Stream) -> None:
        """Cancel the stream as a client does: the call ends at once."""
        self._runs[self.streams.index(stream)].cancel()

    async def until_tokens(self, num_tokens: int) -> None:
        """Wait until every stream has that many tokens."""
        await asyncio.gather(*(stream.until_tokens(num_tokens) for stream in self.streams))

    async def finished(self) -> list[Stream]:
        """Return all streams once all have ended."""
        await asyncio.gather(*self._runs, return_exceptions=True)
        return self.streams


@asynccontextmanager
async def load(client: AsyncClient, streams: Sequence[Stream] = ()) -> AsyncIterator[Load]:
    """Run streams beside the test. When the context ends, cancel those that still run."""
    async with watched_pauses() as pauses, asyncio.TaskGroup() as tasks:
        running = Load(client, tasks, pauses)
        for stream in streams:
            running.start(stream)
        try:
            yield running
        finally:
            for run in running._runs:
                run.cancel()


def streams(count: int, *, max_tokens: int = 60, prefix: str = "r", **arguments: Any) -> list[Stream]:
    """Return that many requests, each with its own prompt and seed. The same arguments always give the same
    requests."""
    return [
        Stream(
            request_id=f"{prefix}-{number}-{time.monotonic_ns()}",
            prompt=f"def f{number:03d}(x): # {CANARY}",
            arguments={"max_tokens": max_tokens, "seed": number + 1, "ignore_eos": True, **arguments},
        )
        for number in range(count)
    ]


async def answers(client: AsyncClient, wanted: Sequence[Stream]) -> list[Stream]:
    """Run all streams at once, each to its end."""
    async with load(client, wanted) as running:
        return await running.finished()


async def states(client: AsyncClient) -> dict[str, int]:
    """Return the state of each worker as the router sees it."""
    return {worker.worker_id or worker.address: worker.state for worker in await client.list_workers()}


async def holders(client: AsyncClient) -> dict[str, str]:
    """Return the worker of each of the router's requests, by request."""
    return {request.request_id: request.worker_id for request in await client.list_requests()}


async def until(
    holds: Callable[[], bool | Awaitable[bool]], what: str, *, seconds: float = 30.0, every: float = 0.01
) -> float:
    """Return the seconds until the condition held. Raises AssertionError with `what` if it does not hold within the
    bound."""
    started = time.monotonic()
    while True:
        held = holds()
        if held if isinstance(held, bool) else await held:
            return time.monotonic() - started
        assert time.monotonic() - started < seconds, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(every)


async def until_ready(client: AsyncClient, *worker_ids: str, seconds: float = 60.0) -> float:
    """Wait until exactly these workers are READY."""

    async def are_ready() -> bool:
        ready = {name for name, state in (await states(client)).items() if state == READY}
        return ready == set(worker_ids)

    return await until(are_ready, f"{worker_ids} are ready", seconds=seconds)
