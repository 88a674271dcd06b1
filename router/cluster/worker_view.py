"""Worker view: one worker as this router knows it: its identity, state, load and steps.

Pure. Does not own the events that change it (view.py), or what follows from it for pulls (sources.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.proto.roles import Role, role_named
from blockyard.proto.step_costs import StepCosts
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.bookings import Bookings
from blockyard.router.cluster.depths import CachedDepth, usable_cached_tokens
from blockyard.router.cluster.gate import WorkerGate
from blockyard.router.placement.adapters import (
    NO_SLOTS,
    Adapter,
    AdapterSlots,
    Resident,
)
from blockyard.router.placement.pulls import Link
from blockyard.router.placement.rates import WorkerSpeed
from blockyard.router.placement.scoring import Candidate

STEP_WINDOW_SECONDS = 0.5
"""Time over which a worker's steps are averaged."""
LONGEST_STEP_SECONDS = 60.0
"""Time constant, in seconds of steps, with which a worker's longest step fades."""
MAX_STEP_SECONDS = 60.0
"""A report of longer steps is not believed."""


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
    lacking: set[str] = field(default_factory=set)
    """Fingerprints of LoRA adapters that this incarnation cannot load."""
    booked: Bookings = field(default_factory=Bookings)
    kind: int = 0
    """Number of the kind of its blocks. Workers of one number exchange blocks. 0: it has not said the kind."""
    role: Role = field(init=False)
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

    @property
    def used_blocks(self) -> int:
        """Return the blocks in use, with those of requests that it has not reported yet."""
        booked = self.booked
        return booked.waiting.blocks + max(
            self.load.used_blocks + booked.unreported.blocks, booked.sent.blocks
        )

    @property
    def adapter_slots(self) -> AdapterSlots:
        hello, load = self.hello, self.load
        if hello is None or not hello.max_loras:
            return NO_SLOTS
        residents = tuple(
            Resident(one.fingerprint, 1000 * one.load_seconds, one.requests_per_second, one.running > 0)
            for one in load.adapters
        )
        coming = frozenset(self.booked.adapters)
        return AdapterSlots(hello.max_loras, residents, coming, 1000 * load.adapter_load_seconds)

    def may_serve(self, adapter: Adapter) -> bool:
        has_slots = self.hello is not None and self.hello.max_loras > 0
        return has_slots and adapter.fingerprint not in self.lacking

    def has_room(self, now: float, max_unstarted: int) -> bool:
        """Return True if one more request should find a position in the worker's own queue."""
        if self.booked.sent.unstarted >= max_unstarted or not self.gate.admits(now):
            return False
        # A shut gate counts queue positions itself, and more exactly.
        if self.gate.is_shut or self.hello is None or not self.hello.max_waiting:
            return True
        return self.load.waiting + self.booked.unreported.unstarted < self.hello.max_waiting

    def state(self, silence_seconds: float, *, suspect_seconds: float, lost_seconds: float) -> WorkerState:
        match self.link:
            case LinkState.CONNECTING:
                return WorkerState.CONNECTING
            case LinkState.REFUSED:
                return WorkerState.REFUSED
            case LinkState.LOST:
                return WorkerState.LOST
            case LinkState.ACCEPTED:
                if silence_seconds < suspect_seconds:
                    return WorkerState.DRAINING if self.is_draining else WorkerState.READY
                return WorkerState.SUSPECT if silence_seconds < lost_seconds else WorkerState.LOST

    def __post_init__(self) -> None:
        self.role = role_named(self.hello.role if self.hello else "")
        self.worker_id = WorkerId(self.hello.worker_id if self.hello else "")
        self.incarnation = Incarnation(self.hello.incarnation if self.hello else "")


class ReadyWorkers:
    """The ready workers, listed once for many placements. None may change its state meanwhile."""

    def __init__(self, everyone: list[WorkerView], suspect_seconds: float) -> None:
        others = [worker for worker in everyone if worker.role != "prefill"]
        self.everyone = everyone
        self.serving = others or everyone
        """Workers that may serve whole requests."""
        self.beginning = [worker for worker in everyone if worker.role == "prefill"] if others else []
        """Workers that begin requests for the others to continue."""
        self.by_kind: dict[int, dict[WorkerId, WorkerView]] = {}
        """Workers by id, apart by the kind of their blocks."""
        for worker in everyone:
            self.by_kind.setdefault(worker.kind, {})[worker.worker_id] = worker
        self.incarnations = {worker.worker_id: worker.incarnation for worker in everyone}
        self.until = suspect_seconds + min((worker.last_heard or 0.0 for worker in everyone), default=inf)
        """When the first of them becomes suspect, unless it is heard again."""


def exchange(first: WorkerView, second: WorkerView) -> bool:
    """Return whether these workers may take blocks from each other: whether the blocks are of one kind."""
    return first.kind == second.kind != 0


def able_to_serve(workers: Sequence[WorkerView], adapter: Adapter | None) -> Sequence[WorkerView]:
    """Return the workers that may serve requests for an adapter. None: requests for the bare model."""
    return workers if adapter is None else [worker for worker in workers if worker.may_serve(adapter)]


def candidate_of(
    worker: WorkerView,
    names: Sequence[bytes],
    prompt_tokens: int,
    depth: CachedDepth,
    now: float,
    arrived_blocks: int,
    *,
    costs: StepCosts,
    link: Link,
    adapter_ms: float = 0.0,
) -> Candidate:
    """Return what placement sees of a worker for a prompt with these block names.

    `depth` is what the worker has cached according to the index, and `arrived_blocks` what has just reached it.
    """
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
    slowness = worker.speed.slowness
    sequences = waiting.requests + max(load.running + load.waiting + fresh.requests, sent.requests)
    context_tokens = waiting.prompt_tokens + max(
        load.context_tokens + fresh.prompt_tokens, sent.prompt_tokens
    )
    queued_tokens, queued_pairs = queued_prefill(worker)
    return Candidate(
        address=worker.address,
        worker_id=worker.worker_id,
        cached_tokens=cached_tokens,
        host_cached_tokens=usable_cached_tokens(anywhere, prompt_tokens, block_size) - cached_tokens,
        queued_prefill_tokens=queued_tokens,
        queued_pairs=queued_pairs,
        sequences=sequences,
        context_tokens=context_tokens,
        used_blocks=worker.used_blocks,
        total_blocks=worker.hello.total_blocks,
        block_size=block_size,
        prefill_tokens_per_second=costs.tokens_per_second / slowness,
        pair_tokens=costs.pair_tokens,
        decode_step_ms=1000 * slowness * costs.decode_seconds(sequences, context_tokens)
        if sequences
        else 0.0,
        host_tokens_per_second=load.host_tokens_per_second,
        link=link,
        role=worker.role,
        kind=worker.kind,
        adapter_ms=adapter_ms,
    )


def queued_prefill(worker: WorkerView) -> tuple[int, int]:
    """Return the prompt tokens that a worker has yet to compute, and their pairs (Candidate.queued_pairs)."""
    load, sent, fresh = worker.load, worker.booked.sent, worker.booked.unreported
    waiting = worker.booked.waiting
    tokens = max(load.queued_prefill_tokens + fresh.unstarted_tokens, sent.unstarted_tokens)
    pairs = max(load.queued_pairs + fresh.unstarted_pairs, sent.unstarted_pairs)
    return waiting.unstarted_tokens + tokens, waiting.unstarted_pairs + pairs
