"""What this router believes of each worker: who it is, whether it lives, how loaded it is, what it will soon
cache.

Pure: events go in, snapshots come out, time comes from an injected clock. A worker's state follows from how
long it has been silent. What this router has placed counts at once, as load and as a speculative prefix, so
that many simultaneous requests of one group do not scatter before the first of them is reported stored.

Does not own connections (engine_link.py), the choice (placement.py) or the index (prefix_index.py).
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from blockyard.proto.prefix_index import Incarnation, WorkerId
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.admission import WorkerGate
from blockyard.router.placement import Candidate

STORED_GRACE_SECONDS = 1.0
"""How long a speculative prefix outlives the worker's first token: the index has it after some 20 ms."""
MAX_UNSTARTED = 32
"""Requests of this router that one worker may have without a first token: more wait in the router's line, where
they can still go elsewhere. It bounds how many are on their way before a BUSY can be heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedDepth:
    """How much of a prompt a worker holds, by the index."""

    blocks: int = 0
    """Leading blocks on its GPU."""
    host_blocks: int = 0
    """Those that follow them and are in its host memory."""


class LinkState(Enum):
    """What the connection itself knows; silence comes on top of it."""

    CONNECTING = auto()
    ACCEPTED = auto()
    REFUSED = auto()
    LOST = auto()


class WorkerState(Enum):
    CONNECTING = auto()
    READY = auto()
    SUSPECT = auto()
    REFUSED = auto()
    LOST = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Placed:
    """A request that this router has put on a worker and that is not over."""

    address: str
    names: Sequence[bytes]
    """Of the prompt's full blocks."""
    uncached_tokens: int
    """Prompt tokens that the worker was expected to compute."""
    blocks: int
    """That it was expected to take from its pool."""
    started: bool = False
    over: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerView:
    """One address and the life of a worker that last answered there."""

    address: str
    link: LinkState = LinkState.CONNECTING
    reason: str = ""
    hello: session_pb2.Hello | None = None
    load: cluster_pb2.WorkerLoad = field(default_factory=cluster_pb2.WorkerLoad)
    last_heard: float | None = None
    gate: WorkerGate = field(default_factory=WorkerGate)
    placed: list[Placed] = field(default_factory=list)
    speculative: Counter[bytes] = field(default_factory=Counter)
    """Names of blocks that placed requests will store, by how many of them will."""
    fading: deque[tuple[float, Sequence[bytes]]] = field(default_factory=deque)
    """Stored names and when the index may be trusted to have them; in order of that time."""

    @property
    def num_unstarted(self) -> int:
        return sum(not placed.started for placed in self.placed)

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.hello.worker_id if self.hello else "")

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.hello.incarnation if self.hello else "")


class ClusterView:
    """All workers by address. Every method is synchronous and cheap."""

    def __init__(self, *, suspect_seconds: float, lost_seconds: float, clock: Callable[[], float]) -> None:
        self._suspect_seconds = suspect_seconds
        self._lost_seconds = lost_seconds
        self._clock = clock
        self._workers: dict[str, WorkerView] = {}

    # What happened

    def known(self, address: str) -> None:
        self._workers.setdefault(address, WorkerView(address=address))

    def forget(self, address: str) -> None:
        self._workers.pop(address, None)

    def accepted(self, address: str, hello: session_pb2.Hello) -> None:
        """A worker introduced itself and is of our model: a fresh life, nothing placed on it."""
        self._workers[address] = WorkerView(
            address=address,
            link=LinkState.ACCEPTED,
            hello=hello,
            load=hello.load,
            last_heard=self._clock(),
        )

    def refused(self, address: str, hello: session_pb2.Hello, reason: str) -> bool:
        """A worker introduced itself and is not to be used: whether that is news."""
        before = self._workers.get(address)
        self._workers[address] = WorkerView(
            address=address, link=LinkState.REFUSED, hello=hello, reason=reason, last_heard=self._clock()
        )
        return before is None or before.link is not LinkState.REFUSED or before.reason != reason

    def disconnected(self, address: str, reason: str) -> None:
        """The stream ended. Who was here stays visible as lost; what was placed there is void."""
        worker = self._workers.get(address)
        if worker is None or worker.link is LinkState.REFUSED:
            return
        worker.link = LinkState.LOST if worker.hello else LinkState.CONNECTING
        worker.reason = reason
        worker.load = cluster_pb2.WorkerLoad()
        worker.placed.clear()
        worker.speculative.clear()
        worker.fading.clear()

    def heard(self, address: str, load: cluster_pb2.WorkerLoad | None = None) -> None:
        """Any message is a sign of life; some bring a load report."""
        worker = self._workers[address]
        worker.last_heard = self._clock()
        if load is not None:
            worker.load = load
            if load.waiting == 0:
                worker.gate.nobody_waits(self._clock())

    def placed(self, address: str, *, names: Sequence[bytes], uncached_tokens: int, blocks: int) -> Placed:
        worker = self._workers[address]
        placed = Placed(address=address, names=names, uncached_tokens=uncached_tokens, blocks=blocks)
        worker.placed.append(placed)
        worker.speculative.update(names)
        worker.gate.took_one(self._clock())
        return placed

    def started(self, placed: Placed) -> None:
        """Its first output came: the prompt is stored, and soon the index says so."""
        worker = self._workers.get(placed.address)
        if worker is None or placed.started or placed not in worker.placed:
            return
        placed.started = True
        worker.fading.append((self._clock() + STORED_GRACE_SECONDS, placed.names))
        worker.gate.freed_one()

    def ended(self, placed: Placed, *, busy: bool = False) -> None:
        """It finished, was cancelled or rejected; `busy` says that the worker's queue was full."""
        worker = self._workers.get(placed.address)
        if worker is None or placed not in worker.placed:
            return
        worker.placed.remove(placed)
        if busy:
            worker.gate.shut(self._clock())
        if not placed.started:
            _subtract(worker.speculative, placed.names)
            # One that had started left its place in the worker's queue then.
            if not busy:
                worker.gate.freed_one()

    # What follows from it

    def state(self, worker: WorkerView) -> WorkerState:
        match worker.link:
            case LinkState.CONNECTING:
                return WorkerState.CONNECTING
            case LinkState.REFUSED:
                return WorkerState.REFUSED
            case LinkState.LOST:
                return WorkerState.LOST
            case LinkState.ACCEPTED:
                silence = self.silence_seconds(worker)
                if silence < self._suspect_seconds:
                    return WorkerState.READY
                return WorkerState.SUSPECT if silence < self._lost_seconds else WorkerState.LOST

    def silence_seconds(self, worker: WorkerView) -> float:
        return float("inf") if worker.last_heard is None else self._clock() - worker.last_heard

    def at(self, address: str) -> WorkerView | None:
        return self._workers.get(address)

    def workers(self) -> list[WorkerView]:
        return list(self._workers.values())

    def ready(self) -> list[WorkerView]:
        return [worker for worker in self._workers.values() if self.state(worker) is WorkerState.READY]

    def find(self, worker_id: str) -> WorkerView | None:
        """By id; among several lives the one heard last."""
        lives = [
            worker for worker in self._workers.values() if worker.hello and worker.worker_id == worker_id
        ]
        return min(lives, key=self.silence_seconds, default=None)

    def incarnations(self) -> dict[WorkerId, Incarnation]:
        """Of the workers that may get a request: whose index entries count."""
        return {worker.worker_id: worker.incarnation for worker in self.ready()}

    def candidates(
        self,
        names: Sequence[bytes],
        prompt_tokens: int,
        depths: Mapping[WorkerId, CachedDepth],
        *,
        respect_gates: bool = True,
    ) -> list[Candidate]:
        """The workers that may take a prompt with these block names now; `depths` is what the index said."""
        now = self._clock()
        return [
            self._candidate(worker, names, prompt_tokens, depths.get(worker.worker_id, CachedDepth()))
            for worker in self.ready()
            if not respect_gates or (worker.gate.admits(now) and worker.num_unstarted < MAX_UNSTARTED)
        ]

    def _candidate(
        self, worker: WorkerView, names: Sequence[bytes], prompt_tokens: int, depth: CachedDepth
    ) -> Candidate:
        assert worker.hello is not None
        self._fade(worker)
        block_size = worker.hello.block_size
        on_gpu = max(depth.blocks, _speculative_depth(worker.speculative, names))
        anywhere = max(depth.blocks + depth.host_blocks, on_gpu)
        cached_tokens = usable_cached_tokens(on_gpu, prompt_tokens, block_size)
        unstarted = [placed for placed in worker.placed if not placed.started]
        # A report counts what we placed as soon as the worker has seen it. The larger of report and own books
        # needs no clock to tell whether it has, and never counts a request twice.
        return Candidate(
            address=worker.address,
            worker_id=worker.worker_id,
            cached_tokens=cached_tokens,
            host_cached_tokens=usable_cached_tokens(anywhere, prompt_tokens, block_size) - cached_tokens,
            queued_prefill_tokens=max(
                worker.load.queued_prefill_tokens, sum(placed.uncached_tokens for placed in unstarted)
            ),
            sequences=max(worker.load.running + worker.load.waiting, len(worker.placed)),
            used_blocks=max(worker.load.used_blocks, sum(placed.blocks for placed in worker.placed)),
            total_blocks=worker.hello.total_blocks,
            block_size=block_size,
            prefill_tokens_per_second=worker.load.prefill_tokens_per_second,
            decode_tokens_per_second=worker.load.decode_tokens_per_second,
            host_tokens_per_second=worker.load.host_tokens_per_second,
        )

    def _fade(self, worker: WorkerView) -> None:
        now = self._clock()
        while worker.fading and worker.fading[0][0] <= now:
            _subtract(worker.speculative, worker.fading.popleft()[1])

    def check_invariants(self) -> None:
        for worker in self._workers.values():
            expected: Counter[bytes] = Counter()
            for placed in worker.placed:
                if not placed.started:
                    expected.update(placed.names)
            for _, names in worker.fading:
                expected.update(names)
            assert worker.speculative == expected, f"speculative names of {worker.address} do not add up"


def usable_cached_tokens(depth_blocks: int, prompt_tokens: int, block_size: int) -> int:
    """Tokens of a cached prefix that save work: the last prompt token is always computed, so that it has logits."""
    return min(depth_blocks * block_size, (prompt_tokens - 1) // block_size * block_size)


def _speculative_depth(speculative: Counter[bytes], names: Sequence[bytes]) -> int:
    """Leading names that are spoken for. Whoever placed block i placed all before it, so bisection is exact."""
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        if names[middle] in speculative:
            low = middle + 1
        else:
            high = middle
    return low


def _subtract(counter: Counter[bytes], names: Sequence[bytes]) -> None:
    for name in names:
        if counter[name] > 1:
            counter[name] -= 1
        else:
            del counter[name]
