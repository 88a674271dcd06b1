"""Routers and workers in virtual time: the real view and `place()`, the index twin, and a small worker model.

Routers share nothing but the index and what workers tell. Reports of load come every 50 ms, and so are up to 50 ms old.
Each worker tells all routers at once which prompts have reached it.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any

from blockyard.proto.index.contract import Batch, Berth, Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.naming.marks import marks
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.depths import CachedDepth, usable_cached_tokens
from blockyard.router.cluster.view import ClusterView
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.policies import PlacementRequest, place

BLOCK_SIZE = 16
NUM_WORKERS = 8
REPORT_SECONDS = 0.05
PUBLISH_SECONDS = 0.02
ARRIVAL_SECONDS = 0.001
"""From a placement until the other routers have heard of it."""
SHARED_TOKENS = 960
"""Prompt tokens that a request shares with its group."""
OWN_TOKENS = 160
PROMPT_TOKENS = SHARED_TOKENS + OWN_TOKENS + 5
PREFILL_TOKENS_PER_SECOND = 10_000.0
DECODE_SECONDS = 1.0
"""From a request's first token to its last."""


class World:
    """Time that jumps to the next event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, event))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()


@dataclass(eq=False)
class Worker:
    """Computes prompts one after another, decodes all at once, forgets nothing."""

    name: str
    world: World
    index: TwinPrefixIndex
    views: list[ClusterView] = field(default_factory=list)
    """The views of all routers."""
    cached: set[bytes] = field(default_factory=set)
    free_at: float = 0.0
    """When the last prompt of the queue will be computed."""
    num_requests: int = 0
    num_open: int = 0
    used_blocks: int = 0
    cached_tokens: int = 0
    waited_seconds: float = 0.0
    """Total time to the first tokens, over all requests."""

    def __post_init__(self) -> None:
        known = {"address": self.name, "fingerprint": "model", "block_size": BLOCK_SIZE}
        record = WorkerRecord(worker_id=WorkerId(self.name), incarnation=Incarnation(self.name), **known)
        self.berth: Berth = answer(self.index.register(record, lease_seconds=1e9))
        self.num_batches = 0

    def hello(self) -> session_pb2.Hello:
        return session_pb2.Hello(
            worker_id=self.name, incarnation=self.name, block_size=BLOCK_SIZE, total_blocks=100_000
        )

    def submit(self, names: list[bytes], started: Callable[[], None], ended: Callable[[], None]) -> None:
        held = next((depth for depth, name in enumerate(names) if name not in self.cached), len(names))
        cached_tokens = usable_cached_tokens(held, PROMPT_TOKENS, BLOCK_SIZE)
        self.cached.update(names)
        self.num_requests += 1
        self.num_open += 1
        packed = marks(names, BLOCK_SIZE)
        for view in self.views:
            self.world.at(self.world.now + ARRIVAL_SECONDS, lambda view=view: view.arrived(self.name, packed))
        self.used_blocks += len(names)
        self.cached_tokens += cached_tokens
        seconds = (PROMPT_TOKENS - cached_tokens) / PREFILL_TOKENS_PER_SECOND
        self.free_at = max(self.free_at, self.world.now) + seconds
        self.waited_seconds += self.free_at - self.world.now
        self.world.at(self.free_at, started)
        self.world.at(self.free_at + PUBLISH_SECONDS, lambda: self._publish(names[held:]))
        self.world.at(self.free_at + DECODE_SECONDS, lambda: self._end(len(names), ended))

    def report(self) -> cluster_pb2.WorkerLoad:
        queued_seconds = max(self.free_at - self.world.now, 0.0)
        return cluster_pb2.WorkerLoad(
            running=self.num_open,
            queued_prefill_tokens=round(queued_seconds * PREFILL_TOKENS_PER_SECOND),
            used_blocks=self.used_blocks,
            context_tokens=self.num_open * PROMPT_TOKENS,
            prefill_tokens_per_second=PREFILL_TOKENS_PER_SECOND,
            decode_tokens_per_second=1_000.0,
        )

    def _publish(self, names: list[bytes]) -> None:
        self.num_batches += 1
        answer(self.index.apply(self.berth, Batch(sequence=self.num_batches, added=tuple(names))))

    def _end(self, num_blocks: int, ended: Callable[[], None]) -> None:
        self.num_open -= 1
        self.used_blocks -= num_blocks
        ended()


class Router:
    def __init__(self, world: World, index: TwinPrefixIndex, workers: list[Worker], chance: Random) -> None:
        self._index, self._chance = index, chance
        self._workers = {worker.name: worker for worker in workers}
        self.view = ClusterView(suspect_seconds=1e9, lost_seconds=2e9, clock=world)
        for worker in workers:
            self.view.accepted(worker.name, worker.hello())
            worker.views.append(self.view)
            self._hear(worker, world)

    def _hear(self, worker: Worker, world: World) -> None:
        """Reports of each worker come at times of their own to each router."""

        def again() -> None:
            self.view.heard(worker.name, worker.report())
            world.at(world.now + REPORT_SECONDS, again)

        world.at(self._chance.uniform(0.0, REPORT_SECONDS), again)

    def arrive(self, names: list[bytes]) -> None:
        depths = {
            holder.worker_id: CachedDepth(blocks=holder.depth) for holder in answer(self._index.lookup(names))
        }
        arrived = self.view.arrived_depths(names, BLOCK_SIZE)
        candidates = self.view.candidates(names, PROMPT_TOKENS, depths, arrived)
        request = PlacementRequest(prompt_tokens=PROMPT_TOKENS)
        chosen = place(request, candidates, "prefix", self._chance, PlacementConfig()).chosen
        placed: Placed = self.view.placed(
            chosen.address,
            names=names,
            prompt_tokens=PROMPT_TOKENS,
            uncached_tokens=chosen.uncached_tokens,
            blocks=-(-chosen.needed_tokens // BLOCK_SIZE),
        )
        self.view.sent(placed)
        self._workers[chosen.address].submit(
            names, lambda: self.view.started(placed), lambda: self.view.ended(placed)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    shares: list[float]
    """Share of the requests that each worker got, in descending order."""
    reuse: float
    """Part of all prompt tokens that were cached where they came."""
    first_token_seconds: float
    """Mean."""


def outcome(
    num_routers: int, seed: int, *, num_groups: int, num_requests: int, requests_per_second: float
) -> Outcome:
    """Groups of requests that share a prefix, in Poisson arrivals, each at a router by chance."""
    world, chance = World(), Random(seed)
    index = TwinPrefixIndex(world)
    workers = [Worker(f"w{number}", world, index) for number in range(NUM_WORKERS)]
    routers = [Router(world, index, workers, Random(f"{seed} {n}")) for n in range(num_routers)]
    shared = [
        chain(b"r" * 16, pack_tokens([group] * SHARED_TOKENS), BLOCK_SIZE) for group in range(num_groups)
    ]
    time = 0.0
    for number in range(num_requests):
        time += chance.expovariate(requests_per_second)
        prefix = chance.choice(shared)
        names = prefix + chain(prefix[-1], pack_tokens([number] * OWN_TOKENS), BLOCK_SIZE)
        router = chance.choice(routers)
        world.at(time, lambda router=router, names=names: router.arrive(names))
    world.run(time + 10.0)
    for router in routers:
        router.view.check_invariants()
    counts = Counter({worker.name: worker.num_requests for worker in workers})
    assert counts.total() == num_requests
    return Outcome(
        shares=[count / num_requests for _, count in counts.most_common()],
        reuse=sum(worker.cached_tokens for worker in workers) / (num_requests * PROMPT_TOKENS),
        first_token_seconds=sum(worker.waited_seconds for worker in workers) / num_requests,
    )


def answer(operation: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a call of the twin, which never suspends."""
    try:
        operation.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the twin waits for something")
