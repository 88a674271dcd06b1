"""A Redis that stops, or is killed and comes back empty."""

import asyncio
import os
import signal
from pathlib import Path

from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.index.contract import (
    FIRST_SEQUENCE,
    Batch,
    ErrorKind,
    Incarnation,
    WorkerId,
)
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.dispatch.prefix_lookup import (
    BreakerState,
    LookupResult,
    PrefixLookup,
    PrefixLookupConfig,
)

from tests.unit.index.harness import chain, record

KNOWN = {WorkerId("a"): Incarnation("1"), WorkerId("b"): Incarnation("1")}


UNAVAILABLE = LookupResult(available=False)


async def test_a_stopped_redis_costs_a_request_no_more_than_the_time_out(tmp_path: Path) -> None:
    process = start_private_redis(tmp_path)
    try:
        # Only the look-up's own time-out can end it.
        async with asyncio.timeout(180), connect(process.url, timeout_seconds=600.0) as client:
            index = RedisPrefixIndex(client, "stopped")
            berth = await index.register(record("a"), lease_seconds=60)
            await index.apply(berth, Batch(sequence=FIRST_SEQUENCE, added=chain(4)))
            patient = PrefixLookup(index, config=PrefixLookupConfig(timeout_seconds=5.0))
            assert (await patient.lookup(chain(9), KNOWN)).depth_by_worker == {"a": CachedDepth(blocks=4)}
            lookup = PrefixLookup(index, config=PrefixLookupConfig(open_seconds=0.1))
            os.kill(process.pid, signal.SIGSTOP)
            for _ in range(3):
                assert await lookup.lookup(chain(9), KNOWN) == UNAVAILABLE
            assert lookup.errors == {ErrorKind.TIMEOUT: 3}
            assert lookup.breaker_state() is BreakerState.OPEN
            os.kill(process.pid, signal.SIGCONT)
            async with asyncio.timeout(60):
                found = UNAVAILABLE
                while not found.available:
                    await asyncio.sleep(0.02)
                    found = await lookup.lookup(chain(9), KNOWN)
            assert found.depth_by_worker == {"a": CachedDepth(blocks=4)}
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.stop()
