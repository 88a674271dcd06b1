"""Sources: from which workers a prompt's blocks may be fetched, and how fast blocks reach a worker.

Owns a number for each kind of blocks, since workers of unequal kinds exchange none. Owns the bytes that the pulls of
this router's requests still move, at both of their ends. Pure. Does not own the state of workers (view.py), or the
price of a pull (../placement/pulls.py).
"""

from collections import Counter
from collections.abc import Mapping

from blockyard.proto.index.contract import WorkerId
from blockyard.proto.naming.block_kind import BlockKind
from blockyard.proto.step_costs import StepCosts
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.depths import CachedDepth, deepest, usable_cached_tokens
from blockyard.router.cluster.worker_view import LinkState, WorkerView, queued_prefill
from blockyard.router.placement.pulls import UNKNOWN_LINK, Link, PullSource
from blockyard.router.placement.rates import is_measured

MAX_SOURCES = 2
"""Workers of one kind from which a prompt's blocks may be fetched: those that have most of them."""
MAX_SETUP_SECONDS = 60.0
"""A worker that reports a longer time to begin a pull is not believed, and nothing is pulled to it."""


class PullLinks:
    """Links of the workers, and the bytes that the pulls of one router still move."""

    def __init__(self) -> None:
        self._measured: set[str] = set()
        """Addresses of workers that have measured how fast blocks reach them. Without any, nothing is pulled."""
        self._pulling = Counter[str]()
        """Bytes that the pulls of this router's requests still bring, by the address of the destination."""
        self._lending = Counter[str]()
        """The same bytes by the address of the source."""
        self._kinds: dict[BlockKind, int] = {}

    @property
    def are_measured(self) -> bool:
        """Return whether any worker has measured its link."""
        return bool(self._measured)

    def number_of(self, kind: BlockKind) -> int:
        """Return the number by which this router calls a kind of blocks. It is 0 for one that is not known."""
        return self._kinds.setdefault(kind, len(self._kinds) + 1) if kind.is_known else 0

    def forget(self, address: str) -> None:
        self._measured.discard(address)
        self._pulling += Counter()  # drops the zeros
        self._lending += Counter()

    def note(self, worker: WorkerView) -> None:
        if worker.load.pull_bytes_per_second:
            self._measured.add(worker.address)
        else:
            self._measured.discard(worker.address)

    def count(self, placed: Placed, sign: int) -> None:
        """Count the bytes of a placed request's pull at both of its ends."""
        if placed.pull is not None:
            self._pulling[placed.address] += sign * placed.pull.num_bytes
            self._lending[placed.pull.source.address] += sign * placed.pull.num_bytes

    def link(self, worker: WorkerView) -> Link:
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

    def sources(
        self,
        depths: Mapping[WorkerId, CachedDepth],
        by_kind: Mapping[int, Mapping[WorkerId, WorkerView]],
        prompt_tokens: int,
        costs: StepCosts,
        *,
        salt: int,
    ) -> list[PullSource]:
        """Return the ready workers of each kind from which others may fetch most of a prompt. The `salt` chooses among
        equal ones."""
        sources = []
        for kind, ready in by_kind.items():
            if not kind or len(ready) == 1:
                continue  # no other worker could fetch from it
            among = None if len(by_kind) == 1 else ready
            for worker_id in deepest(depths, MAX_SOURCES, salt, among):
                worker = ready.get(worker_id)
                if worker is not None:
                    depth = depths[worker_id]
                    source = self.source(worker, depth.blocks + depth.host_blocks, prompt_tokens, costs)
                    sources += [] if source is None else [source]
        return sources

    def source(
        self, worker: WorkerView, blocks: int, prompt_tokens: int, costs: StepCosts
    ) -> PullSource | None:
        """Return a worker as a source of this many leading blocks of a prompt, or None where it lends none. One that
        does not say the kind of its blocks lends none either."""
        hello = worker.hello
        is_able = worker.kind != 0 and worker.link is LinkState.ACCEPTED
        if hello is None or not hello.transfer_port or not is_able:
            return None
        host = worker.address.rpartition(":")[0]
        return PullSource(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            address=worker.address,
            transfer_address=f"{host}:{hello.transfer_port}",
            cached_tokens=usable_cached_tokens(blocks, prompt_tokens, hello.block_size),
            lending_bytes=max(worker.load.lending_bytes, self._lending[worker.address]),
            step_ms=_lending_step_ms(worker, costs),
            kind=worker.kind,
        )


def _lending_step_ms(worker: WorkerView, costs: StepCosts) -> float:
    """Return the time of the step that a worker is likely to be in. With prompts queued, that is a long one."""
    rate = costs.tokens_per_second / worker.speed.slowness
    if not is_measured(rate):
        return worker.step_ms
    tokens, pairs = queued_prefill(worker)
    queue_ms = 1000 * (tokens + costs.pair_tokens * pairs) / rate
    return max(worker.step_ms, min(queue_ms, worker.longest_step_ms))
