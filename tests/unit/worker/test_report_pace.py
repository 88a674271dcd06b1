"""Reports of load cost a worker a bounded time with a hundred routers, and a router one with a thousand workers.

The real session service runs in virtual time. Its load changes all the time, as on a busy worker.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from blockyard.proto.v1.session_pb2 import Hello, Ping, ToWorker
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import PING_SECONDS
from blockyard.worker.engine_types import EngineLoad, StepResult
from blockyard.worker.session.router_streams import REPORTS_A_SECOND, report_seconds
from blockyard.worker.session.session import SessionService

from simulation.virtual_time import VirtualLoop

STEP_SECONDS = 0.01
SECONDS = 10
PINGS = SECONDS / PING_SECONDS


class Engine:
    """An engine that is always in time and has no request."""

    stalled_seconds = 0.0

    def call(self, command: object) -> None:
        pass


async def traffic(num_routers: int, num_workers: int) -> Counter[str]:
    """Count what a busy worker sends to `num_routers`, each of which has `num_workers`, in SECONDS."""
    service = SessionService(hello=Hello(), vocab_size=100, max_waiting=9)
    load = EngineLoad(**dict.fromkeys(EngineLoad.__dataclass_fields__, 0))
    service.attach(cast(Any, Engine()), load)
    fleet = Fleet(tokenizer_fingerprint="", suspect_seconds=2.0, lost_seconds=3.0)
    fleet.links = cast(Any, dict.fromkeys(range(num_workers)))
    sent: Counter[str] = Counter()

    async def router(number: int) -> AsyncIterator[bytes]:
        await asyncio.sleep(PING_SECONDS * number / num_routers)
        while True:
            ping = Ping(nonce=1, report_seconds=fleet.report_seconds)
            yield ToWorker(ping=ping).SerializeToString()
            await asyncio.sleep(PING_SECONDS)

    async def stream(number: int) -> None:
        async for message in service._session(router(number), cast(Any, None)):
            sent[str(message.WhichOneof("message"))] += 1

    streams = [asyncio.create_task(stream(number)) for number in range(num_routers)]
    for step in range(round(SECONDS / STEP_SECONDS)):
        await asyncio.sleep(STEP_SECONDS)
        service._deliver([], [], cast(StepResult, None), replace(load, running=1 + step % 7), [])
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return sent


def run(num_routers: int, num_workers: int) -> Counter[str]:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(traffic(num_routers, num_workers))
    finally:
        loop.close()


def test_a_worker_reports_quickly_to_few_routers_of_few_workers() -> None:
    sent = run(num_routers=1, num_workers=2)
    assert sent["step"] >= 15 * SECONDS
    assert sent["pong"] == pytest.approx(PINGS, abs=2)


@pytest.mark.parametrize("num_routers", [10, 40, 100])
def test_a_worker_sends_a_bounded_number_of_reports_to_any_number_of_routers(num_routers: int) -> None:
    sent = run(num_routers, num_workers=2)
    assert sent["step"] <= 1.1 * REPORTS_A_SECOND * SECONDS + num_routers
    assert sent["pong"] == pytest.approx(PINGS * num_routers, rel=0.1)


@pytest.mark.parametrize("num_workers", [64, 256, 1000])
def test_a_router_gets_a_bounded_number_of_reports_from_any_number_of_workers(num_workers: int) -> None:
    """A worker that has been asked reports at this pace, so all do."""
    sent = run(num_routers=1, num_workers=num_workers)
    assert num_workers * sent["step"] / SECONDS <= max(600, 0.3 * num_workers)
    assert sent["pong"] == pytest.approx(PINGS, abs=2)


def test_with_a_thousand_workers_and_a_hundred_routers_pongs_alone_carry_the_load() -> None:
    sent = run(num_routers=100, num_workers=1000)
    assert sent["step"] <= 2 * 100
    per_second = (sent["step"] + sent["pong"]) / SECONDS
    print(f"a worker sends {per_second:.0f} messages a second, a router reads {10 * per_second:.0f}")
    assert per_second <= 2.3 * 100


@pytest.mark.parametrize("asked", [float("nan"), -1.0, 0.0, float("inf"), 1e300])
def test_no_router_can_stop_the_reports(asked: float) -> None:
    assert 0.05 <= report_seconds(1, asked) <= 1.0
