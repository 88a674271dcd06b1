"""One of two Redis servers that share the prefixes dies under load: row 71. The other prefixes are still found."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from blockyard.proto.index.shards import shard_of

from tests.system.processes import SECRET

from .redis_course import NUM_GROUPS, prompt, survives
from .redis_rig import DEGRADED, NUM_WORKERS, RedisCluster, num_errors, redis_cluster_in

DEAD = 1


@dataclass(slots=True, kw_only=True)
class Seen:
    """Answers of look-ups, and reasons of the state, while one server was dead."""

    answered: list[set[int]] = field(default_factory=lambda: [set(), set()])
    """Groups of prompts for which a server answered, by server."""
    unanswered: list[set[int]] = field(default_factory=lambda: [set(), set()])
    found: list[set[int]] = field(default_factory=lambda: [set(), set()])
    """Groups of prompts that a worker caches."""
    reasons: set[str] = field(default_factory=set)
    is_enough: threading.Event = field(default_factory=threading.Event)
    """Set once both servers' prefixes were asked for and the state has a reason."""


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[RedisCluster]:
    with redis_cluster_in(tmp_path, num_others=1) as cluster:
        yield cluster


@pytest.mark.fault(71)
async def test_the_death_of_one_of_two_servers_darkens_its_prefixes_alone(
    two_servers: RedisCluster, measured: dict[str, Any]
) -> None:
    cluster, is_dead, seen = two_servers, threading.Event(), Seen()
    (dead,) = cluster.others

    def harm() -> None:
        dead.kill()
        is_dead.set()

    def heal() -> None:
        seen.is_enough.wait(30.0)  # A busy machine looks up few prefixes a second.
        is_dead.clear()
        dead.start()

    survived, _ = await asyncio.gather(
        survives(cluster, measured, harm=harm, heal=heal, hold_seconds=3.0, resyncs=NUM_WORKERS),
        _look(cluster, is_dead, seen),
    )
    assert seen.answered[0], "no group of prompts has its prefix on the server that lives"
    assert seen.unanswered[DEAD], "no group of prompts has its prefix on the server that died"
    assert not seen.unanswered[0]
    assert not seen.answered[DEAD]
    assert seen.found[0] == seen.answered[0], "the prefixes of the other server are found"
    assert any(reason.startswith("shard 2 of 2: ") for reason in seen.reasons), seen.reasons
    assert survived.num_indexed_at_last > 0, "the other prefixes are placed by the index"
    assert survived.fallback_seconds is not None
    assert num_errors(survived.index) > 0
    for worker in survived.index.workers:
        resyncs = [part.resyncs for part in worker.index.shards]
        assert resyncs[0] == 0 < resyncs[DEAD], "only the server that came back is told everything anew"
    told = [*seen.reasons, *(log.read_text() for log in cluster.processes.logs())]
    assert not any(SECRET in text for text in told)
    assert not any(str(dead.process.port) in reason for reason in seen.reasons)
    measured["note"] += (
        f"; {len(seen.found[0])} of {NUM_GROUPS} prefixes were found meanwhile, {len(seen.unanswered[DEAD])} were dark"
    )


async def _look(cluster: RedisCluster, is_dead: threading.Event, seen: Seen) -> None:
    """Look each group's prefix up while the server is dead. An answer counts if the server is dead before and after."""
    async with cluster.client() as client:
        await asyncio.to_thread(is_dead.wait, 120.0)
        while is_dead.is_set():
            for group in range(NUM_GROUPS):
                found = await client.lookup_prefix(prompt(group))
                if not is_dead.is_set():
                    return
                shard = shard_of(found.block_names[0], 2)
                (seen.answered if found.index_available else seen.unanswered)[shard].add(group)
                if found.holders:
                    seen.found[shard].add(group)
            info = await client.index_info()
            if info.state == DEGRADED and is_dead.is_set():
                seen.reasons.add(info.state_reason)
            if seen.answered[0] and seen.unanswered[DEAD] and seen.reasons:
                seen.is_enough.set()
            await asyncio.sleep(0.05)
