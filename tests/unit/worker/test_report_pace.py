"""Reports of load cost a worker a bounded time with a hundred routers, and a router one with a thousand workers.

The real session service runs in virtual time. Its load changes all the time, as on a busy worker.
"""

import asyncio
import math
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


@pytest.mark.parametrize(
    ("num_routers", "num_workers", "least", "most"),
    [
        (1, 2, 15 * SECONDS, math.inf),
        (10, 2, 0, 1.1 * REPORTS_A_SECOND * SECONDS + 10),
        (40, 2, 0, 1.1 * REPORTS_A_SECOND * SECONDS + 40),
        # A worker that has been asked reports at this pace, so all do.
        (1, 64, 0, 600 * SECONDS / 64),
        (1, 1000, 0, 600 * SECONDS / 1000),
        # Pongs alone carry the load.
        (40, 1000, 0, 2 * 40),
    ],
)
def test_reports_are_quick_among_few_and_bounded_for_a_worker_and_for_a_router(
    num_routers: int, num_workers: int, least: float, most: float
) -> None:
    loop = VirtualLoop()
    try:
        sent = loop.run_until_complete(traffic(num_routers, num_workers))
    finally:
        loop.close()
    assert least <= sent["step"] <= most
    assert sent["pong"] == pytest.approx(PINGS * num_routers, rel=0.1, abs=2)


@pytest.mark.parametrize("asked", [float("nan"), -1.0, 0.0, float("inf"), 1e300])
def test_no_router_can_stop_the_reports(asked: float) -> None:
    assert 0.05 <= report_seconds(1, asked) <= 1.0
