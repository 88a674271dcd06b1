"""Known workers: what follows from the events of a router's workers, for placement and for operators.

Pure: snapshots come out, the clock is an argument. A worker's state follows from how long it has been silent.

Does not own the events (view.py), one worker's state (worker_view.py) or the sources of pulls (sources.py). Nor does it
own the short list of workers (shortlist.py), the index (dispatch/prefix_lookup.py) or the choice of a worker
(placement/policies.py).
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from types import MappingProxyType

from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.arrivals import Arrivals
from blockyard.router.cluster.bookings import Expectations
from blockyard.router.cluster.depths import NOTHING_CACHED, CachedDepth
from blockyard.router.cluster.loads import LoadTable
from blockyard.router.cluster.shortlist import SHORTLIST, shortlist
from blockyard.router.cluster.sources import PullLinks
from blockyard.router.cluster.worker_view import (
    LinkState,
    ReadyWorkers,
    WorkerState,
    WorkerView,
    able_to_serve,
    candidate_of,
    exchange,
    queued_prefill,
)
from blockyard.router.placement.adapters import Adapter, AdapterPrices, adapter_ms
from blockyard.router.placement.columns import row_of
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.pulls import Holder, PullSource
from blockyard.router.placement.rates import ClusterSpeeds
from blockyard.router.placement.scoring import Candidate
from blockyard.router.placement.splits import Beginner

SHORT_FRACTION = 0.75
"""Part of a pool in use from which a worker may have to preempt before its router hears from it again."""


class KnownWorkers:
    """State of all known workers, by address. Only the events of ClusterView change it.

    Every method is synchronous and cheap.
    """

    def __init__(
        self,
        *,
        suspect_seconds: float,
        lost_seconds: float,
        clock: Callable[[], float],
        config: PlacementConfig | None = None,
    ) -> None:
        self._suspect_seconds = suspect_seconds
        self._lost_seconds = lost_seconds
        self._clock = clock
        self._config = config or PlacementConfig()
        self._workers: dict[str, WorkerView] = {}
        self._arrivals = Arrivals[WorkerView](clock)
        self.speeds = ClusterSpeeds(half_life_seconds=self._config.rate_half_life_seconds)
        self._ready: ReadyWorkers | None = None
        """The ready workers, until one of them changes its state. None: to be listed anew."""
        self._pulls = PullLinks()
        self._expectations = Expectations()
        self._table: LoadTable | None = None
        """Made for the first placement that needs a shortlist."""
        self.promised_blocks = 0
        """Blocks that the index promised on the chosen workers, over all placements that reached their first output."""
        self.stale_blocks = 0
        """Promised blocks that the workers did not reuse."""
        self.reused_blocks = 0
        """All blocks that the workers reused for these placements, promised or not."""

    def state(self, worker: WorkerView) -> WorkerState:
        return worker.state(
            self.silence_seconds(worker),
            suspect_seconds=self._suspect_seconds,
            lost_seconds=self._lost_seconds,
        )

    def silence_seconds(self, worker: WorkerView) -> float:
        return float("inf") if worker.last_heard is None else self._clock() - worker.last_heard

    def at(self, address: str) -> WorkerView | None:
        return self._workers.get(address)

    def workers(self) -> list[WorkerView]:
        return list(self._workers.values())

    def ready(self) -> list[WorkerView]:
        return self._listed().everyone

    def _listed(self) -> ReadyWorkers:
        now = self._clock()
        if self._ready is None or now >= self._ready.until:
            ready = [worker for worker in self._workers.values() if self._is_ready(worker, now)]
            self._ready = ReadyWorkers(ready, self._suspect_seconds)
        return self._ready

    def is_ready(self, address: str) -> bool:
        worker = self._workers.get(address)
        return worker is not None and self._is_ready(worker, self._clock())

    def _is_ready(self, worker: WorkerView, now: float) -> bool:
        return (
            worker.link is LinkState.ACCEPTED
            and not worker.is_draining
            and worker.last_heard is not None
            and now - worker.last_heard < self._suspect_seconds
        )

    def is_alive(self, worker_key: tuple[str, str]) -> bool:
        """Return True if this incarnation is connected at this address, however long it has been silent."""
        address, incarnation = worker_key
        worker = self._workers.get(address)
        return worker is not None and worker.link is LinkState.ACCEPTED and worker.incarnation == incarnation

    def find(self, worker_id: str) -> WorkerView | None:
        """Return the worker of this id, or None. Of several incarnations, return the one heard last."""
        known = [
            worker for worker in self._workers.values() if worker.hello and worker.worker_id == worker_id
        ]
        return min(known, key=self.silence_seconds, default=None)

    def namesake(self, address: str, hello: session_pb2.Hello) -> str | None:
        """Return the address of another incarnation with this worker id that was heard recently, or None.

        One that has ended or hangs does not count, so it does not keep its successor out.
        """
        return next(
            (
                worker.address
                for worker in self._workers.values()
                if worker.address != address
                and worker.worker_id == hello.worker_id
                and worker.incarnation != hello.incarnation
                and worker.link is LinkState.ACCEPTED
                and self.silence_seconds(worker) < self._suspect_seconds
            ),
            None,
        )

    def incarnations(self) -> dict[WorkerId, Incarnation]:
        """Return the incarnation of each ready worker, by worker id. Placement ignores index entries of any other."""
        return self._listed().incarnations

    def arrived_depths(self, names: Sequence[bytes], block_size: int) -> dict[str, int]:
        """Return the number of leading blocks of prompts like this that have just reached a worker, by address."""
        return {
            worker.address: blocks
            for worker, blocks in self._arrivals.depths(names, block_size).items()
            if self._workers.get(worker.address) is worker
        }

    def candidates(
        self,
        names: Sequence[bytes],
        prompt_tokens: int,
        depths: Mapping[WorkerId, CachedDepth],
        arrived: Mapping[str, int] = MappingProxyType({}),
        adapter: Adapter | None = None,
    ) -> list[Candidate]:
        """Return the ready workers, with their load and what they have cached of a prompt with these block names.

        Those of role `prefill` are left out, unless there are no others. `depths` holds what they have cached according
        to the index, `arrived` the result of `arrived_depths`. Workers that cannot serve the `adapter` are left out.
        """
        now = self._clock()
        self._compare_speeds(now)
        serving = able_to_serve(self._listed().serving, adapter)
        return self._candidates(serving, names, prompt_tokens, depths, arrived, now, adapter)

    def beginners(
        self,
        names: Sequence[bytes],
        prompt_tokens: int,
        depths: Mapping[WorkerId, CachedDepth],
        arrived: Mapping[str, int] = MappingProxyType({}),
        adapter: Adapter | None = None,
    ) -> list[Beginner]:
        """Return the ready workers of role `prefill`, unless there are no others. Of many, return those with the
        shortest queues."""
        beginning = able_to_serve(self._listed().beginning, adapter)
        workers = nsmallest(SHORTLIST, beginning, key=queued_prefill)
        candidates = self._candidates(workers, names, prompt_tokens, depths, arrived, self._clock(), adapter)
        found = []
        for worker, candidate in zip(workers, candidates, strict=True):
            source = self.pull_source(worker, prompt_tokens // candidate.block_size, prompt_tokens + 1)
            found += [] if source is None else [Beginner(candidate, source)]
        return found

    def _compare_speeds(self, now: float) -> None:
        """Compare the workers' speeds again where that is due."""
        if not self.speeds.is_due(now):
            return
        ready = self.ready()
        self.speeds.refresh([worker.speed for worker in ready], now)
        if self._table is not None:
            for worker in ready:
                self._table.set_slowness(worker.address, worker.speed.slowness)

    def shortlist(
        self,
        names: Sequence[bytes],
        prompt_tokens: int,
        depths: Mapping[WorkerId, CachedDepth],
        arrived: Mapping[str, int] = MappingProxyType({}),
        *,
        key: bytes,
        favourite: WorkerId | None = None,
        most: int = SHORTLIST,
        sources: Sequence[PullSource] = (),
        adapter: Adapter | None = None,
    ) -> list[Candidate]:
        """Return the workers that may be the best for a prompt: `most` of the `candidates`, and the `favourite`.

        Fewer than twice as many workers are all returned. All may fetch blocks from one of the `sources`.
        """
        if len(self._workers) <= 2 * most:
            return self.candidates(names, prompt_tokens, depths, arrived, adapter)
        now, table = self._clock(), self._load_table()
        self._compare_speeds(now)
        slots = table.heard_since(now - self._suspect_seconds)
        if len(slots) <= most:
            return self.candidates(names, prompt_tokens, depths, arrived, adapter)
        found = shortlist(
            names,
            prompt_tokens,
            depths,
            arrived,
            table=table,
            slots=slots,
            expecting=self._expectations.workers(names[0]) if names else (),
            expected_blocks=lambda address: self._workers[address].booked.prefixes.depth(names, now),
            costs=self.speeds.costs,
            config=self._config,
            sources=sources,
            key=key,
            favourite=favourite,
            most=most,
            adapter=adapter,
            lacking=[] if adapter is None else self._lacking(adapter),
        )
        workers = able_to_serve([self._workers[address] for address in found], adapter)
        return self._candidates(workers, names, prompt_tokens, depths, arrived, now, adapter)

    def _lacking(self, adapter: Adapter) -> list[str]:
        return [worker.address for worker in self._workers.values() if adapter.fingerprint in worker.lacking]

    def _expects(self, name: bytes, address: str) -> bool:
        worker = self._workers.get(address)
        return worker is not None and worker.booked.prefixes.depth((name,), self._clock()) > 0

    def _load_table(self) -> LoadTable:
        if self._table is None:
            self._table = LoadTable()
            for worker in self.ready():
                self._changed(worker)
        return self._table

    def _state_changed(self, worker: WorkerView) -> None:
        self._ready = None
        self._changed(worker)

    def _changed(self, worker: WorkerView) -> None:
        """Write a worker's row in the table of loads."""
        if self._table is None:
            return
        is_open = worker.link is LinkState.ACCEPTED and not worker.is_draining and worker.role != "prefill"
        if not is_open or worker.last_heard is None:
            self._table.close(worker.address)
            return
        adapters = worker.adapter_slots
        (bare,) = self._candidates([worker], (), 1, {}, {}, worker.last_heard)
        self._table.put(
            worker.address,
            (worker.worker_id, worker.incarnation),
            worker.last_heard,
            row_of(bare, worker.speed.slowness, AdapterPrices.of(adapters, self._config)),
            adapters.at_hand,
        )

    def _candidates(
        self,
        workers: Sequence[WorkerView],
        names: Sequence[bytes],
        prompt_tokens: int,
        depths: Mapping[WorkerId, CachedDepth],
        arrived: Mapping[str, int],
        now: float,
        adapter: Adapter | None = None,
    ) -> list[Candidate]:
        costs = self.speeds.costs
        return [
            candidate_of(
                worker,
                names,
                prompt_tokens,
                depths.get(worker.worker_id, NOTHING_CACHED),
                now,
                arrived.get(worker.address, 0),
                costs=costs,
                link=self._pulls.link(worker),
                adapter_ms=0.0
                if adapter is None
                else adapter_ms(adapter, worker.adapter_slots, self._config),
            )
            for worker in workers
        ]

    def ready_like(self, worker: WorkerView) -> list[WorkerView]:
        """Return the other ready workers that exchange blocks with this one."""
        like = self._listed().by_kind.get(worker.kind, {}) if worker.kind else {}
        return [one for one in like.values() if one is not worker]

    def unlike(self, worker: WorkerView) -> list[WorkerView]:
        """Return one accepted worker of each other kind of blocks."""
        others = [
            one for one in self._workers.values() if one.link is LinkState.ACCEPTED and one is not worker
        ]
        return list({one.kind: one for one in others if not exchange(one, worker)}.values())

    def pull_sources(
        self, depths: Mapping[WorkerId, CachedDepth], prompt_tokens: int, *, salt: int
    ) -> list[PullSource]:
        """Return the workers of each kind from which others may fetch most of a prompt. The `salt` chooses among
        equal ones."""
        if not self._pulls.are_measured:
            return []
        by_kind = self._listed().by_kind
        return self._pulls.sources(depths, by_kind, prompt_tokens, self.speeds.costs, salt=salt)

    def pull_source(self, worker: WorkerView, blocks: int, prompt_tokens: int) -> PullSource | None:
        """Return a worker as a source of this many leading blocks of a prompt, or None where it lends none."""
        return self._pulls.source(worker, blocks, prompt_tokens, self.speeds.costs)

    def is_short(self, address: str) -> bool:
        """Return True if the worker has so little memory left that it may soon preempt sequences."""
        worker = self._workers.get(address)
        if worker is None or worker.hello is None:
            return False
        return worker.used_blocks > SHORT_FRACTION * worker.hello.total_blocks

    def room(self, worker: WorkerView) -> session_pb2.Room:
        """Return the room that a worker has for sequences which another one preempts. It has none if its own requests
        wait, or if it cannot fetch blocks."""
        link, hello = self._pulls.link(worker), worker.hello
        is_able = link.bytes_per_ms > 0 and worker.load.host_tokens_per_second > 0
        if hello is None or not is_able or worker.load.waiting or worker.booked.waiting.requests:
            return session_pb2.Room()
        free_blocks = int((1 - self._config.memory_free_fraction) * hello.total_blocks)
        return session_pb2.Room(
            blocks=max(free_blocks - worker.used_blocks, 0),
            pull_setup_seconds=link.setup_ms / 1000,
            pull_bytes_per_second=1000 * link.bytes_per_ms,
        )

    def pull_ms(self, worker: WorkerView, tokens: int, source: PullSource) -> float:
        """Return the estimated time for a worker to fetch so many tokens, 0 while its link is unknown."""
        link = self._pulls.link(worker)
        return link.time_ms(tokens, source) if link.bytes_per_ms else 0.0

    def holding_source(self, holder: Holder, prompt_tokens: int) -> PullSource | None:
        """Return the worker that has handed a request over as a source for it, or None where it is gone or silent.

        If it drains, neither the index nor `ready` has it. It has handed all requests over then, so no step delays it,
        whatever its last report says.
        """
        worker = self._workers.get(holder.address)
        if (
            worker is None
            or worker.hello is None
            or worker.incarnation != holder.incarnation
            or self.silence_seconds(worker) >= self._suspect_seconds
        ):
            return None
        source = self.pull_source(worker, holder.tokens // worker.hello.block_size, prompt_tokens)
        return source._replace(step_ms=0.0) if source and worker.is_draining else source

    def check_invariants(self) -> None:
        self._arrivals.check_invariants()
        for worker in self._workers.values():
            worker.booked.check_invariants()
