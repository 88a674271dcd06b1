"""One trial of one system: requests one after another, or many streams at once.

Many streams are measured twice. First by the delay of their first tokens, when all requests arrive at once. Then, once
all of them stream, by tokens over a period and the router's CPU time for them. Owns these measurements. Does not own
the systems (systems.py) or the summaries (figures.py).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from bench.router.load import Ask, Delays, Receipt, delays
from bench.router.processes import cpu_clock, foreign_cores, seconds_of
from bench.router.systems import Stall, System, take_stall

ENDLESS_TOKENS = 10_000
BEGIN_SECONDS = 60.0
"""Time limit for the first tokens of all streams."""
POLL_SECONDS = 0.02
SETTLE_SECONDS = 0.3
"""Time for a router to notice that its clients have gone."""

_numbers = count(1)
"""Numbers of requests. They are unique, because workers keep their stamps by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrial:
    """Measurements of many streams at once."""

    ways: Delays
    tokens_per_second: float
    tokens_per_cpu_second: float
    """Tokens per CPU second of the router's processes and their descendants."""
    cores: float
    """Cores that the router used."""
    tokens_per_message: float
    foreign_cores: float
    """Cores that programs other than this benchmark used."""
    stalls: dict[str, Stall]
    """Longest stalls of the event loop while all requests arrived at once (`burst`), while all streamed (`streaming`),
    and while all were cancelled at once (`end`). Empty for a router without a loop monitor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrial:
    """CPU time of a router per request, in milliseconds, without that of an idle router in the same time."""

    router: float
    tokenizer: float
    """CPU time of the tokenizer processes."""

    @property
    def whole(self) -> float:
        return self.router + self.tokenizer


async def request_cost(
    system: System, num_requests: int, num_tokens: int, *, at_once: int, idle_seconds: float
) -> RequestTrial:
    """Measure requests of which `at_once` run at any time."""
    (router,) = system.pids
    receipts = [Receipt(next(_numbers)) for _ in range(num_requests)]
    permits = asyncio.Semaphore(at_once)
    async with system.client(num_tokens) as ask:

        async def stream(receipt: Receipt) -> None:
            async with permits:
                await ask(receipt)

        idle = _Cpu.now(router)
        await asyncio.sleep(idle_seconds)
        begin = _Cpu.now(router)
        await asyncio.gather(*map(stream, receipts))
        end = _Cpu.now(router)
    await system.workers.take_stamps()
    if any(receipt.num_tokens != num_tokens for receipt in receipts):
        raise ValueError(f"{system.name}: a request got more or fewer than {num_tokens} tokens")
    share = (end.at - begin.at) / (begin.at - idle.at)
    return RequestTrial(
        router=1000 * (end.router - begin.router - share * (begin.router - idle.router)) / num_requests,
        tokenizer=1000 * (end.others - begin.others - share * (begin.others - idle.others)) / num_requests,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cpu:
    """CPU seconds so far of a router's process, and of its descendants."""

    at: float
    router: float
    others: float

    @classmethod
    def now(cls, pid: int) -> "_Cpu":
        whole, alone = cpu_clock((pid,)), seconds_of(pid)
        return cls(at=whole.now, router=alone, others=whole.measured - alone)


async def one_stream(system: System, num_requests: int, num_tokens: int) -> Delays:
    receipts = [Receipt(next(_numbers)) for _ in range(num_requests)]
    async with system.client(num_tokens) as ask:
        for receipt in receipts:
            await ask(receipt)
    for receipt in receipts:
        if receipt.num_tokens != num_tokens:
            raise ValueError(f"{system.name}: a request got {receipt.num_tokens} of {num_tokens} tokens")
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
    """Return the numbers of tokens and messages so far."""
    return sum(receipt.num_tokens for receipt in receipts), sum(len(receipt.messages) for receipt in receipts)


@asynccontextmanager
async def _streaming(ask: Ask, receipts: Sequence[Receipt]) -> AsyncIterator[None]:
    """Send all requests at once, and wait until each has its first token. Cancel them at the end of the context."""

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
            raise ValueError("a stream ended before the trial")
