"""One trial of one system: requests one after another, or many streams at once.

Many streams are judged twice: by their first tokens, all requests having come in one moment; and, once all of them
stream, by the tokens that come in a while and the CPU time that the router takes for it. Owns these figures. Does not
own who serves (systems.py) nor what is made of them (figures.py).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from bench.router.load import Ask, Delays, Receipt, delays
from bench.router.processes import cpu_clock, foreign_cores
from bench.router.systems import Stall, System, take_stall

ENDLESS_TOKENS = 10_000
BEGIN_SECONDS = 60.0
"""By then all streams must have begun."""
POLL_SECONDS = 0.02
SETTLE_SECONDS = 0.3
"""For a router to hear that its clients have gone."""

_numbers = count(1)
"""Of requests; none has one twice, because workers keep their stamps by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrial:
    """Many streams at once."""

    ways: Delays
    tokens_per_second: float
    tokens_per_cpu_second: float
    """Of the router's processes with all that they started."""
    cores: float
    """That the router kept busy."""
    tokens_per_message: float
    foreign_cores: float
    """That programs other than this benchmark kept busy."""
    stalls: dict[str, Stall]
    """The event loop's longest while all requests came in one moment (`burst`), while all streamed, and while all were
    cancelled in one moment (`end`). Empty for a router that has no watch."""


async def one_stream(system: System, num_requests: int, num_tokens: int) -> Delays:
    receipts = [Receipt(next(_numbers)) for _ in range(num_requests)]
    async with system.client(num_tokens) as ask:
        for receipt in receipts:
            await ask(receipt)
    for receipt in receipts:
        if receipt.num_tokens != num_tokens:
            raise ValueError(f"{system.name}: {receipt.num_tokens} of {num_tokens} tokens came")
    return delays(receipts, await system.workers.take_stamps())


async def many_streams(system: System, num_streams: int, seconds: float) -> LoadTrial:
    receipts = [Receipt(next(_numbers)) for _ in range(num_streams)]
    stalls = {"before": await take_stall(system)}
    async with system.client(ENDLESS_TOKENS) as ask, _streaming(ask, receipts):
        stalls["burst"] = await take_stall(system)
        before, old = cpu_clock(system.pids), _counts(receipts)
        await asyncio.sleep(seconds)
        after, new = cpu_clock(system.pids), _counts(receipts)
        stalls["streaming"] = await take_stall(system)
    await asyncio.sleep(SETTLE_SECONDS)
    stalls["end"] = await take_stall(system)
    num_tokens, num_messages = new[0] - old[0], new[1] - old[1]
    elapsed, router = after.now - before.now, after.measured - before.measured
    return LoadTrial(
        ways=delays(receipts, await system.workers.take_stamps()),
        tokens_per_second=num_tokens / elapsed,
        tokens_per_cpu_second=num_tokens / router,
        cores=router / elapsed,
        tokens_per_message=num_tokens / num_messages,
        foreign_cores=foreign_cores(before, after),
        stalls={phase: stall for phase, stall in stalls.items() if stall is not None and phase != "before"},
    )


def _counts(receipts: Sequence[Receipt]) -> tuple[int, int]:
    """Tokens and messages so far."""
    return sum(receipt.num_tokens for receipt in receipts), sum(len(receipt.messages) for receipt in receipts)


@asynccontextmanager
async def _streaming(ask: Ask, receipts: Sequence[Receipt]) -> AsyncIterator[None]:
    """All requests are sent at once; inside, each has had its first token. Afterwards they are cancelled."""

    async def stream(receipt: Receipt) -> None:
        await ask(receipt)

    streams = [asyncio.create_task(stream(receipt)) for receipt in receipts]
    try:
        async with asyncio.timeout(BEGIN_SECONDS):
            while not all(receipt.messages for receipt in receipts):
                _raise_failures(streams)
                await asyncio.sleep(POLL_SECONDS)
        yield
        _raise_failures(streams)
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def _raise_failures(streams: Sequence["asyncio.Task[None]"]) -> None:
    for task in streams:
        if task.done():
            task.result()
            raise ValueError("a stream ended before the trial did")
