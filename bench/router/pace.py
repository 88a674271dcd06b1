"""Shared parts of the router benchmark's scripted workers: a pace, and time stamps of each token.

Owns the process's interface to the benchmark. It prints its ports as one line of JSON. To each line on stdin, it
answers with the stamps since the last answer. It ends with stdin. Does not own a protocol (workers.py, peers.py).
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field

NUM_WORKERS = 4
FIRST_TOKEN = 300
NUM_TOKENS = 1000
"""Number of different tokens that workers emit in turn. All of them are text in the demo model's tokenizer."""
Step = Callable[[int], Awaitable[None]]
"""Sends one token of each running request, with the given emission time."""


@dataclass(slots=True, kw_only=True)
class Stamps:
    """One request as its worker saw it, on the machine's monotonic clock in nanoseconds."""

    arrived: int
    emitted: list[int] = field(default_factory=list)
    """Emission times of the tokens."""


@dataclass(slots=True, eq=False)
class Running:
    """A running request. `handle` is its number in the session with its router, or over HTTP its client's number."""

    handle: int
    num_tokens: int
    stamps: Stamps

    @property
    def is_over(self) -> bool:
        return len(self.stamps.emitted) == self.num_tokens

    def next_token(self, now: int) -> int:
        offset = len(self.stamps.emitted)
        self.stamps.emitted.append(now)
        return FIRST_TOKEN + (7 * offset + self.handle) % NUM_TOKENS


class Book:
    """Stamps of all requests, by the number that the client gave each."""

    def __init__(self) -> None:
        self._stamps: dict[int, Stamps] = {}

    def arrived(self, number: int) -> Stamps:
        self._stamps[number] = Stamps(arrived=time.monotonic_ns())
        return self._stamps[number]

    def take(self) -> dict[int, Stamps]:
        stamps, self._stamps = self._stamps, {}
        return stamps


async def keep_pace(step_seconds: float, step: Step, phase: float) -> None:
    """Call `step` at a pace that does not drift. Missed steps are not caught up. `phase` is a fraction of a step."""
    next_at = time.monotonic() + phase * step_seconds
    while True:
        next_at = max(next_at + step_seconds, time.monotonic())
        await asyncio.sleep(next_at - time.monotonic())
        await step(time.monotonic_ns())


@asynccontextmanager
async def pacing(step_seconds: float, steps: Sequence[Step]) -> AsyncIterator[None]:
    """Run the workers' steps, spread evenly over the time of one step, as those of real workers are."""
    paces = [
        asyncio.create_task(keep_pace(step_seconds, step, number / len(steps)))
        for number, step in enumerate(steps)
    ]
    try:
        yield
    finally:
        for pace in paces:
            pace.cancel()


async def serve_workers(
    workers: Sequence[AbstractAsyncContextManager[tuple[int, Step]]], book: Book, step_seconds: float
) -> None:
    """Serve until stdin ends. Each worker's context yields its port and its step."""
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(worker) for worker in workers]
        await stack.enter_async_context(pacing(step_seconds, [step for _, step in started]))
        _say([port for port, _ in started])
        while await asyncio.to_thread(sys.stdin.readline):
            _say({number: asdict(stamps) for number, stamps in book.take().items()})


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)
