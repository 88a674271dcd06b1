"""Cluster view: each worker as this router knows it: its identity, state and load, and what it will soon cache.

Pure: events go in, snapshots come out, the clock is an argument. A worker's state follows from how long it has been
silent. A placed request counts at once, as load and as a speculative prefix. So simultaneous requests with a common
prefix go to one worker before the index has that prefix.

Does not own connections (link.py), sums over placed requests (bookings.py), the short list of workers (shortlist.py) or
the index (dispatch/prefix_lookup.py). Nor does it choose a worker (placement/policies.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType

from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.arrivals import Arrivals
from blockyard.router.cluster.bookings import Bookings, Expectations, Placed
from blockyard.router.cluster.depths import NOTHING_CACHED, CachedDepth, deepest
from blockyard.router.cluster.gate import WorkerGate
from blockyard.router.cluster.loads import LoadTable
from blockyard.router.cluster.shortlist import SHORTLIST, shortlist
from blockyard.router.placement.columns import row_of
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.pulls import UNKNOWN_LINK, Holder, Link, PullPlan, PullSource
from blockyard.router.placement.rates import ClusterSpeeds, WorkerSpeed, is_measured
from blockyard.router.placement.scoring import Candidate

MAX_SOURCES = 2
"""Workers from which a prompt's blocks may be fetched: those that have most of them."""
STEP_WINDOW_SECONDS = 0.5
"""Time over which a worker's steps are averaged."""
LONGEST_STEP_SECONDS = 60.0
"""Time constant, in seconds of steps, with which a worker's longest step fades."""
MAX_STEP_SECONDS = 60.0
"""A report of longer steps is not believed."""
MAX_SETUP_SECONDS = 60.0
"""A worker that reports a longer time to begin a pull is not believed, and nothing is pulled to it."""


class LinkState(Enum):
    """State of the connection to a worker, however long the worker has been silent."""

    CONNECTING = auto()
    ACCEPTED = auto()
    REFUSED = auto()
    LOST = auto()


class WorkerState(Enum):
    CONNECTING = auto()
    READY = auto()
    DRAINING = auto()
    SUSPECT = auto()
    REFUSED = auto()
    LOST = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerView:
    """State of one address, and of the incarnation that last introduced itself there."""

    address: str
    link: LinkState = LinkState.CONNECTING
    reason: str = ""
    hello: session_pb2.Hello | None = None
    load: cluster_pb2.WorkerLoad = field(default_factory=cluster_pb2.WorkerLoad)
    speed: WorkerSpeed = field(default_factory=WorkerSpeed)
    index: cluster_pb2.WorkerIndex | None = None
    """The worker's last report about its part of the prefix index."""
    last_heard: float | None = None
    is_draining: bool = False
    """True if the worker has announced that it takes no new requests."""
    _step_ms: float = 0.0
    longest_step_ms: float = 0.0
    """Time of the longest recent step: an older one counts less."""
    gate: WorkerGate = field(default_factory=WorkerGate)
    booked: Bookings = field(default_factory=Bookings)
    worker_id: WorkerId = field(init=False)
    incarnation: Incarnation = field(init=False)

    def note_steps(self, load: cluster_pb2.WorkerLoad) -> None:
        """Count the steps between the last load report and this one in their average time.

        Reports count by the time of their steps, not by their number: a request is more likely to arrive during a long
        step.
        """
        steps, seconds = load.steps - self.load.steps, load.step_seconds - self.load.step_seconds
        if steps > 0 and 0 <= seconds <= MAX_STEP_SECONDS * steps:
            share = min(seconds / STEP_WINDOW_SECONDS, 1.0)
            step_ms = 1000 * seconds / steps
            self._step_ms += share * (step_ms - self._step_ms)
            fading = 1 - min(seconds / LONGEST_STEP_SECONDS, 1.0)
            self.longest_step_ms = max(step_ms, fading * self.longest_step_ms)

    @property
    def step_ms(self) -> float:
        """Return the average step time, weighted by time. 0 while the worker has nothing to do."""
        return self._step_ms if self.load.running or self.load.waiting else 0.0

    def __post_init__(self) -> None:
        self.worker_id = WorkerId(self.hello.worker_id if self.hello else "")
        self.incarnation = Incarnation(self.hello.incarnation if self.hello else "")


class ClusterView:
    """State of all known workers, by address. Every method is synchronous and cheap."""

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
        self._ready: list[WorkerView] | None = None
        """The ready workers, until one of them changes its state. None: to be listed anew."""
        self._incarnations: dict[WorkerId, Incarnation] = {}
        self._ready_by_id: dict[WorkerId, WorkerView] = {}
        self._measured_links: set[str] = set()
        """Addresses of workers that have measured how fast blocks reach them. Without any, nothing is pulled."""
        self._ready_until = 0.0
        """When the first of the ready workers becomes suspect, unless it is heard again."""
        self._expectations = Expectations()
        self._pulling = Counter[str]()
        """Bytes that the pulls of this router's requests still bring, by the address of the destination."""
        self._lending = Counter[str]()
        """The same bytes by the address of the source."""
        self._table: LoadTable | None = None
        """Made for the first placement that needs a shortlist."""
        self.promised_blocks = 0
        """Blocks that the index promised on the chosen workers, over all placements that reached their first output."""
        self.stale_blocks = 0
        """Promised blocks that the workers did not reuse."""
        self.reused_blocks = 0
        """All blocks that the workers reused for these placements, promised or not."""

    # Events

    def known(self, address: str) -> None:
        self._workers.setdefault(address, WorkerView(address=address))

    def forget(self, address: str) -> None:
        self._workers.pop(address, None)
        self._measured_links.discard(address)
        self._pulling += Counter()  # drops the zeros
        self._lending += Counter()
        self._ready = None
        if self._table is not None:
            self._table.remove(address)

    def accepted(self, address: str, hello: session_pb2.Hello) -> None:
        """Record a worker that introduced itself with `hello` and may serve. Its bookings begin empty.

        An incarnation that comes back keeps its measured speed and its age.
        """
        now, before = self._clock(), self._workers.get(address)
        is_same = (
            before is not None and before.hello is not None and before.hello.incarnation == hello.incarnation
        )
        worker = self._workers[address] = WorkerView(
            address=address,
            link=LinkState.ACCEPTED,
            hello=hello,
            load=hello.load,
            is_draining=hello.is_draining,
            last_heard=now,
            speed=before.speed if before is not None and is_same else WorkerSpeed(),
        )
        self.speeds.report(worker.speed, hello.load, now)
        self._note_link(worker)
        self._state_changed(worker)

    def refused(self, address: str, hello: session_pb2.Hello, reason: str) -> bool:
        """Record a worker that must not be used. Return True unless it was refused for the same reason before."""
        before = self._workers.get(address)
        worker = self._workers[address] = WorkerView(
            address=address, link=LinkState.REFUSED, hello=hello, reason=reason, last_heard=self._clock()
        )
        self._state_changed(worker)
        return before is None or before.link is not LinkState.REFUSED or before.reason != reason

    def disconnected(self, address: str, reason: str) -> None:
        """Record the end of the stream. A worker that had been accepted stays visible as lost, without load and
        bookings.

        A refused worker stays refused.
        """
        worker = self._workers.get(address)
        if worker is None or worker.link is LinkState.REFUSED:
            return
        worker.link = LinkState.LOST if worker.hello else LinkState.CONNECTING
        worker.reason = reason
        worker.load = cluster_pb2.WorkerLoad()
        self._note_link(worker)
        worker.booked = Bookings()
        self._state_changed(worker)

    def heard(
        self, address: str, load: cluster_pb2.WorkerLoad | None = None, last_handle: int | None = None
    ) -> None:
        """Record a message of the worker, and its load report if it has one.

        The report counts our requests up to `last_handle`, or all if it is None.
        """
        worker, now = self._workers[address], self._clock()
        if not self._is_ready(worker, now):
            self._ready = None
        worker.last_heard = now
        if load is not None:
            worker.note_steps(load)
            worker.load = load
            self._note_link(worker)
            self.speeds.report(worker.speed, load, now)
            worker.booked.reported(last_handle)
            if load.waiting == 0:
                worker.gate.queue_was_empty(now)
        self._changed(worker)

    def _note_link(self, worker: WorkerView) -> None:
        if worker.load.pull_bytes_per_second:
            self._measured_links.add(worker.address)
        else:
            self._measured_links.discard(worker.address)

    def placed(
        self,
        address: str,
        *,
        names: Sequence[bytes],
        prompt_tokens: int,
        uncached_tokens: int,
        blocks: int,
        promised_blocks: int = 0,
        pull: PullPlan | None = None,
    ) -> Placed:
        worker = self._workers[address]
        placed = Placed(
            address=address,
            names=names,
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached_tokens,
            blocks=blocks,
            promised_blocks=promised_blocks,
            pull=pull,
        )
        worker.booked.add(placed)
        self._count_pull(placed, 1)
        if names:
            self._expectations.note(names[0], address)
            self._expectations.sweep(self._expects)
        self._changed(worker)
        return placed

    @contextmanager
    def without(self, placed: Placed) -> Iterator[None]:
        """Leave out an unsent request's booking for the life of the context, in which its worker is chosen again."""
        worker = self._workers.get(placed.address)
        if worker is None or placed not in worker.booked:
            yield
            return
        worker.booked.remove(placed)
        self._changed(worker)
        try:
            yield
        finally:
            worker.booked.add(placed)
            self._changed(worker)

    def sent(self, placed: Placed) -> None:
        """Record that the request is now sent to its worker."""
        worker = self._workers.get(placed.address)
        if worker is not None and placed in worker.booked:
            worker.booked.send(placed)
            worker.gate.took_one(self._clock())
            self._changed(worker)

    def has_room(self, address: str) -> bool:
        """Return True if one more request should find a position in the worker's own queue."""
        worker = self._workers.get(address)
        return worker is not None and self._has_room(worker, self._clock())

    def started(self, placed: Placed, *, cached_tokens: int | None = None) -> None:
        """Record a request's first output: the worker has cached the prompt, and the index will soon know. Ignore later
        ones.

        `cached_tokens` are the prompt tokens that the worker reused, to compare with the index's promise. None: do not
        compare.
        """
        self.pull_ended(placed)  # A worker that needed no pull reports none.
        worker = self._workers.get(placed.address)
        if worker is None or placed.started or placed not in worker.booked:
            return
        worker.booked.start(placed, stored_at=self._clock() + self._config.stored_grace_seconds)
        worker.gate.freed_one()
        self._changed(worker)
        if cached_tokens is not None and worker.hello is not None:
            reused_blocks = cached_tokens // worker.hello.block_size
            self.reused_blocks += reused_blocks
            self.promised_blocks += placed.promised_blocks
            self.stale_blocks += max(placed.promised_blocks - reused_blocks, 0)

    def pull_ended(self, placed: Placed) -> None:
        """Record that the request's pull has ended, whether it brought all of its blocks or not."""
        self._count_pull(placed, -1)
        placed.pull = None

    def _count_pull(self, placed: Placed, sign: int) -> None:
        """Count the bytes of a placed request's pull at both of its ends."""
        if placed.pull is not None:
            self._pulling[placed.address] += sign * placed.pull.num_bytes
            self._lending[placed.pull.source.address] += sign * placed.pull.num_bytes

    def arrived(self, address: str, marks: bytes, withdrawn_marks: bytes = b"") -> None:
        """Record the marks of prompts that have reached the worker, from whichever router. Forget the others."""
        worker = self._workers.get(address)
        if worker is not None:
            self._arrivals.add(worker, marks)
            self._arrivals.withdraw(worker, withdrawn_marks)

    def draining(self, address: str, is_draining: bool = True) -> None:
        """Record whether the worker takes new requests. Running ones continue."""
        worker = self._workers.get(address)
        if worker is not None and worker.is_draining is not is_draining:
            worker.is_draining = is_draining
            self._state_changed(worker)

    def ended(self, placed: Placed, *, busy: bool = False) -> None:
        """Record that a request has left its worker, for whatever reason. `busy`: the worker refused it, because its
        queue was full."""
        self.pull_ended(placed)
        worker = self._workers.get(placed.address)
        if worker is None or placed not in worker.booked:
            return
        worker.booked.remove(placed)
        self._changed(worker)
        if busy:
            worker.gate.shut(self._clock())
        elif placed.sent and not placed.started:
            # A started request has already left its position in the worker's queue.
            worker.gate.freed_one()

    # State that follows from the events

    def state(self, worker: WorkerView) -> WorkerState:
        match worker.link:
            case LinkState.CONNECTING:
                return WorkerState.CONNECTING
            case LinkState.REFUSED:
                return WorkerState.REFUSED
            case LinkState.LOST:
                return WorkerState.LOST
            case LinkState.ACCEPTED:
                if self.silence_seconds(worker) < self._suspect_seconds:
                    return WorkerState.DRAINING if worker.is_draining else WorkerState.READY
                is_suspect = self.silence_seconds(worker) < self._lost_seconds
                return WorkerState.SUSPECT if is_suspect else WorkerState.LOST

    def silence_seconds(self, worker: WorkerView) -> float:
        return float("inf") if worker.last_heard is None else self._clock() - worker.last_heard

    def at(self, address: str) -> WorkerView | None:
        return self._workers.get(address)

    def workers(self) -> list[WorkerView]:
        return list(self._workers.values())

    def ready(self) -> list[WorkerView]:
        now = self._clock()
        if self._ready is None or now >= self._ready_until:
            self._ready = [worker for worker in self._workers.values() if self._is_ready(worker, now)]
            self._ready_by_id = {worker.worker_id: worker for worker in self._ready}
            self._incarnations = {worker.worker_id: worker.incarnation for worker in self._ready}
            self._ready_until = self._suspect_seconds + min(
                (worker.last_heard or 0.0 for worker in self._ready), default=float("inf")
            )
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
        self.ready()
        return self._incarnations

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
    ) -> list[Candidate]:
        """Return the ready workers, with their load and what they have cached of a prompt with these block names.

        `depths` holds what they have cached according to the index, `arrived` the result of `arrived_depths`.
        """
        now = self._clock()
        self._compare_speeds(now)
        return self._candidates(self.ready(), names, prompt_tokens, depths, arrived, now)

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
    ) -> list[Candidate]:
        """Return the ready workers that may be the best for a prompt: `most` of the `candidates`, and the `favourite`.

        Fewer than twice as many workers are all returned. All may fetch blocks from one of the `sources`.
        """
        if len(self._workers) <= 2 * most:
            return self.candidates(names, prompt_tokens, depths, arrived)
        now, table = self._clock(), self._load_table()
        self._compare_speeds(now)
        slots = table.heard_since(now - self._suspect_seconds)
        if len(slots) <= most:
            return self.candidates(names, prompt_tokens, depths, arrived)
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
        )
        workers = [self._workers[address] for address in found]
        return self._candidates(workers, names, prompt_tokens, depths, arrived, now)

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
        if worker.link is not LinkState.ACCEPTED or worker.is_draining or worker.last_heard is None:
            self._table.close(worker.address)
            return
        self._table.put(
            worker.address,
            (worker.worker_id, worker.incarnation),
            worker.last_heard,
            row_of(self._candidate(worker, (), 1, NOTHING_CACHED, worker.last_heard), worker.speed.slowness),
        )

    def _has_room(self, worker: WorkerView, now: float) -> bool:
        booked, hello = worker.booked, worker.hello
        if booked.sent.unstarted >= self._config.max_unstarted or not worker.gate.admits(now):
            return False
        # A shut gate counts queue positions itself, and more exactly.
        if worker.gate.is_shut or hello is None or not hello.max_waiting:
            return True
        return worker.load.waiting + booked.unreported.unstarted < hello.max_waiting

    def _candidates(
        self,
        workers: Sequence[WorkerView],
        names: Sequence[bytes],
        prompt_tokens: int,
        depths: Mapping[WorkerId, CachedDepth],
        arrived: Mapping[str, int],
        now: float,
    ) -> list[Candidate]:
        return [
            self._candidate(
                worker,
                names,
                prompt_tokens,
                depths.get(worker.worker_id, NOTHING_CACHED),
                now,
                arrived.get(worker.address, 0),
            )
            for worker in workers
        ]

    def _candidate(
        self,
        worker: WorkerView,
        names: Sequence[bytes],
        prompt_tokens: int,
        depth: CachedDepth,
        now: float,
        arrived_blocks: int = 0,
    ) -> Candidate:
        assert worker.hello is not None
        load, sent, fresh = worker.load, worker.booked.sent, worker.booked.unreported
        waiting = worker.booked.waiting
        block_size = worker.hello.block_size
        on_gpu = max(depth.blocks, arrived_blocks, worker.booked.prefixes.depth(names, now))
        anywhere = max(depth.blocks + depth.host_blocks, on_gpu)
        cached_tokens = usable_cached_tokens(on_gpu, prompt_tokens, block_size)
        # A load report counts the requests of all routers, except those sent after it. Our bookings count our own
        # requests, whether or not the worker has seen them. Both can only be too low, so the larger is closer, and
        # counts no request twice. Neither includes requests that wait here for the worker.
        costs, slowness = self.speeds.costs, worker.speed.slowness
        sequences = waiting.requests + max(load.running + load.waiting + fresh.requests, sent.requests)
        context_tokens = waiting.prompt_tokens + max(
            load.context_tokens + fresh.prompt_tokens, sent.prompt_tokens
        )
        queued_tokens, queued_pairs = _queued_prefill(worker)
        return Candidate(
            address=worker.address,
            worker_id=worker.worker_id,
            cached_tokens=cached_tokens,
            host_cached_tokens=usable_cached_tokens(anywhere, prompt_tokens, block_size) - cached_tokens,
            queued_prefill_tokens=queued_tokens,
            queued_pairs=queued_pairs,
            sequences=sequences,
            context_tokens=context_tokens,
            used_blocks=waiting.blocks + max(load.used_blocks + fresh.blocks, sent.blocks),
            total_blocks=worker.hello.total_blocks,
            block_size=block_size,
            prefill_tokens_per_second=costs.tokens_per_second / slowness,
            pair_tokens=costs.pair_tokens,
            decode_step_ms=1000 * slowness * costs.decode_seconds(sequences, context_tokens)
            if sequences
            else 0.0,
            host_tokens_per_second=load.host_tokens_per_second,
            link=self._link(worker),
        )

    def _link(self, worker: WorkerView) -> Link:
        load, hello = worker.load, worker.hello
        if (
            not load.pull_bytes_per_second
            or hello is None
            or not 0 <= load.pull_setup_seconds <= MAX_SETUP_SECONDS
        ):
            return UNKNOWN_LINK
        return Link(
            setup_ms=1000 * load.pull_setup_seconds,
            bytes_per_ms=load.pull_bytes_per_second / 1000,
            token_bytes=hello.block_bytes / hello.block_size,
            pulling_bytes=max(load.pulling_bytes, self._pulling[worker.address]),
            step_ms=worker.step_ms,
        )

    def pull_sources(
        self, depths: Mapping[WorkerId, CachedDepth], prompt_tokens: int, *, salt: int
    ) -> list[PullSource]:
        """Return the workers from which others may fetch most of a prompt. The `salt` chooses among equal ones."""
        if not self._measured_links:
            return []
        sources = []
        self.ready()
        for worker_id in deepest(depths, MAX_SOURCES, salt):
            worker = self._ready_by_id.get(worker_id)
            if worker is not None:
                depth = depths[worker_id]
                source = self.pull_source(worker, depth.blocks + depth.host_blocks, prompt_tokens)
                sources += [] if source is None else [source]
        return sources

    def pull_source(self, worker: WorkerView, blocks: int, prompt_tokens: int) -> PullSource | None:
        """Return a worker as a source of this many leading blocks of a prompt, or None where it lends none."""
        hello = worker.hello
        if hello is None or not hello.transfer_port or worker.link is not LinkState.ACCEPTED:
            return None
        host = worker.address.rpartition(":")[0]
        return PullSource(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            address=worker.address,
            transfer_address=f"{host}:{hello.transfer_port}",
            cached_tokens=usable_cached_tokens(blocks, prompt_tokens, hello.block_size),
            lending_bytes=max(worker.load.lending_bytes, self._lending[worker.address]),
            step_ms=self._lending_step_ms(worker),
        )

    def _lending_step_ms(self, worker: WorkerView) -> float:
        """Return the time of the step that a worker is likely to be in. With prompts queued, that is a long one."""
        rate = self.speeds.costs.tokens_per_second / worker.speed.slowness
        if not is_measured(rate):
            return worker.step_ms
        tokens, pairs = _queued_prefill(worker)
        queue_ms = 1000 * (tokens + self.speeds.costs.pair_tokens * pairs) / rate
        return max(worker.step_ms, min(queue_ms, worker.longest_step_ms))

    def holding_source(self, holder: Holder, prompt_tokens: int) -> PullSource | None:
        """Return the worker that has handed a request over as a source for it, or None where it is gone or silent.

        It takes no new requests, so neither the index nor `ready` has it. It has handed all of them over, so no step
        delays it, whatever its last report says.
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
        return source and source._replace(step_ms=0.0)

    def check_invariants(self) -> None:
        self._arrivals.check_invariants()
        for worker in self._workers.values():
            worker.booked.check_invariants()


def _queued_prefill(worker: WorkerView) -> tuple[int, int]:
    """Return the prompt tokens that a worker has yet to compute, and their pairs (Candidate.queued_pairs)."""
    load, sent, fresh = worker.load, worker.booked.sent, worker.booked.unreported
    waiting = worker.booked.waiting
    tokens = max(load.queued_prefill_tokens + fresh.unstarted_tokens, sent.unstarted_tokens)
    pairs = max(load.queued_pairs + fresh.unstarted_pairs, sent.unstarted_pairs)
    return waiting.unstarted_tokens + tokens, waiting.unstarted_pairs + pairs


def usable_cached_tokens(depth_blocks: int, prompt_tokens: int, block_size: int) -> int:
    """Return the prompt tokens that a cached prefix of `depth_blocks` saves.

    The block of the last prompt token is never reused: the token is computed for its logits.
    """
    return min(depth_blocks * block_size, (prompt_tokens - 1) // block_size * block_size)
