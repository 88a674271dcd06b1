"""Pulls: blocks that come from another worker, and the sequences that wait for them.

A pull receives named blocks into reserved slots of host memory, which nothing else sees. When it ends, the blocks that
arrived intact are cached there like any others, and its sequences are admitted with them. What did not arrive is
computed. So a pull can fail at any moment without harm. Routers price later pulls by the rates of those that have
ended.

Owns the bookkeeping, on the engine's thread. Does not own the bytes (../transfer/) or the choice of a source (the
router). Has no clock: time is an argument.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from blockyard.worker.cache.block_tables import BlockTables, Loan
from blockyard.worker.cache.host_memory import HostCache
from blockyard.worker.sequences.identifiers import BlockName, HostSlot, RequestId, SequenceId, TenantId
from blockyard.worker.sequences.sequence import Sequence

MAX_PULLS = 64
"""Pulls that are under way or wait for their turn, such as those of all sequences that a worker hands over."""
LATE_SECONDS = 0.25
"""Time after its deadline in which a pull must end. After it, its sequences go on without it."""
KEPT_SHARE = 0.8
"""Share of their weight that earlier measurements keep at each new one."""
LEAST_SECONDS = 1e-6
"""Shortest time of a transfer, so that a rate is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """Order of a router to fetch the leading blocks of a prompt, or of a replay, from another worker."""

    address: str
    """The source's transfer address "host:port"."""
    incarnation: str
    """The source's incarnation. Another one at that address has nothing of what the router knows."""
    num_blocks: int
    """Leading blocks that the source has. Those that are here already are not fetched."""
    seconds: float
    """Time from now after which the request goes on with what has arrived."""


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """One transfer under way. Its receiver changes nothing but `num_arrived`."""

    order: PullOrder
    request_id: RequestId | None
    """The request that began it. None: an operator's order."""
    tenant: TenantId
    prefix: list[BlockName]
    """Names of the leading blocks, up to the last one that is fetched."""
    slots: list[HostSlot]
    """Slots for the last of these blocks. The others are here."""
    head: Loan
    """The blocks that are here. They are kept until the pull ends."""
    began: float
    """Time on the engine's clock, as `deadline`."""
    deadline: float
    num_arrived: int = 0
    """Blocks that have arrived intact so far."""
    is_ordered: bool = False
    """Whether it goes on without a sequence that waits for it: an operator does."""
    is_cancelled: bool = False
    """Whether nobody waits for it any more. Its receiver then ends it soon."""

    @property
    def names(self) -> list[BlockName]:
        """The names of the blocks that are fetched, in order of `slots`."""
        return self.prefix[len(self.head) :]


class NoHostMemory(Exception):
    """There is no host memory to fetch blocks into."""


class PullsBusy(Exception):
    """Too many pulls are under way, or host memory has no slot that may be used."""


class UnderWay(Exception):
    """Another pull fetches the next block already."""


class Pulls:
    """The pulls of one engine."""

    def __init__(self, tables: BlockTables, *, index_stride_blocks: int) -> None:
        self._tables = tables
        self._index_stride_blocks = index_stride_blocks
        self._under_way: dict[BlockName, Pull] = {}
        """The pull that fetches each name."""
        self._waiting: dict[Pull, list[Sequence]] = {}
        """The sequences that wait for each pull, of any request."""
        self._pull_of: dict[SequenceId, Pull] = {}
        self._behind: dict[SequenceId, tuple[PullOrder, float]] = {}
        """Orders, with their deadlines, of sequences that wait for another one's pull. Those may want more blocks."""
        self.num_blocks = 0
        """Blocks that have arrived since the engine's start."""
        self.num_failed = 0
        """Pulls that brought fewer blocks than they should have, though somebody waited for them."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_coming(self) -> int:
        """Return how many blocks are still to arrive."""
        return sum(len(pull.slots) - pull.num_arrived for pull in self._waiting)

    def begin(self, sequence: Sequence, order: PullOrder, now: float) -> Pull | None:
        """Let a new sequence wait for the blocks that `order` names. A replay may fetch blocks of generated tokens too.

        Return the pull to start. Return None where there is nothing to fetch or no room. Where another pull fetches the
        next block already, the sequence waits for that one, and the result is None too.
        """
        host_cache = self._tables.host_cache
        if host_cache is None or sequence.wants_whole_prompt or order.seconds <= 0:
            return None
        usable = min(order.num_blocks, (len(sequence.tokens) - 1) // self._tables.block_size)
        prefix = sequence.names[1 : 1 + usable]
        head = self._tables.lend(prefix)
        following = prefix[len(head) :]
        other = self._under_way.get(following[0]) if following else None
        if other is not None and not other.is_cancelled:
            self._wait(sequence, other)
            self._behind[sequence.sequence_id] = order, now + order.seconds
        slots = self._reserve(following, host_cache) if other is None else []
        if not slots:
            self._tables.end_loan(head)
            return None
        pull = self._new(order, prefix, head, slots, now, sequence.tenant, sequence.request_id)
        self._wait(sequence, pull)
        return pull

    def order(
        self, prefix: list[BlockName], order: PullOrder, tenant: TenantId, now: float
    ) -> tuple[Pull | None, int]:
        """Return a pull of these leading blocks to start, for which no sequence need wait, and how many of the blocks
        are here.

        The pull is None where all are here. Raises NoHostMemory, PullsBusy or UnderWay.
        """
        host_cache = self._tables.host_cache
        if host_cache is None:
            raise NoHostMemory
        head = self._tables.lend(prefix)
        following = prefix[len(head) :]
        is_under_way = bool(following) and following[0] in self._under_way
        slots = self._reserve(following, host_cache) if following and not is_under_way else []
        if slots:
            return self._new(order, prefix, head, slots, now, tenant, None), len(head)
        self._tables.end_loan(head)
        if is_under_way:
            raise UnderWay
        if following:
            raise PullsBusy
        return None, len(head)

    def _new(
        self,
        order: PullOrder,
        prefix: list[BlockName],
        head: Loan,
        slots: list[HostSlot],
        now: float,
        tenant: TenantId,
        request_id: RequestId | None,
    ) -> Pull:
        pull = Pull(
            order=order,
            request_id=request_id,
            tenant=tenant,
            prefix=prefix[: len(head) + len(slots)],
            slots=slots,
            head=head,
            began=now,
            deadline=now + order.seconds,
            is_ordered=request_id is None,
        )
        self._waiting[pull] = []
        self._under_way.update(dict.fromkeys(pull.names, pull))
        return pull

    def _reserve(self, names: list[BlockName], host_cache: HostCache) -> list[HostSlot]:
        """Return slots for these blocks, up to the first that another pull fetches."""
        if len(self._waiting) >= MAX_PULLS:
            return []
        known = (index for index, name in enumerate(names) if name in self._under_way)
        return host_cache.reserve(next(known, len(names)))

    def _wait(self, sequence: Sequence, pull: Pull) -> None:
        sequence.is_pulling = True
        expected = len(pull.prefix) * self._tables.block_size
        sequence.cached_at_submit = max(sequence.cached_at_submit, expected)
        self._pull_of[sequence.sequence_id] = pull
        self._waiting[pull].append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence that has ended no longer wait. A pull for which nobody waits is cancelled."""
        pull = self._pull_of.pop(sequence.sequence_id, None)
        if pull is not None:
            sequence.is_pulling = False
            self._behind.pop(sequence.sequence_id, None)
            self._waiting[pull].remove(sequence)
            pull.is_cancelled = not (self._waiting[pull] or pull.is_ordered)

    def release_late(self, now: float) -> None:
        """Let the sequences of pulls that should have ended go on. The slots stay reserved until `end`."""
        for pull in self._waiting:
            if now >= pull.deadline + LATE_SECONDS:
                self._go_on(pull)

    def end(self, pull: Pull, num_received: int) -> list[tuple[Sequence, PullOrder, float]]:
        """Cache the leading blocks that have arrived intact, free the other slots, and let the sequences go on.

        The receiver must not write to the slots any more. Return the sequences that may begin a pull of their own now,
        with its order and deadline: they only waited for this one.
        """
        host_cache, first = self._tables.host_cache, len(pull.head)
        assert host_cache is not None, "a pull needs host memory"
        self.num_failed += num_received < len(pull.slots) and not pull.is_cancelled
        if not self._tables.has(pull.prefix[:first]):
            num_received = 0  # host memory was cleared meanwhile: no prompt could reach these blocks
        tenant = self._tables.owner_of(pull.prefix[0], otherwise=pull.tenant)
        for index, slot in enumerate(pull.slots[:num_received], start=first):
            host_cache.commit(
                pull.prefix[index],
                slot,
                tenant,
                parent=pull.prefix[index - 1] if index else None,
                is_indexed=(index + 1) % self._index_stride_blocks == 0,
            )
        host_cache.release(pull.slots[num_received:])
        host_cache.done(pull.names[:num_received])
        self._tables.end_loan(pull.head)
        self.num_blocks += num_received
        following = [
            (sequence, *self._behind[sequence.sequence_id])
            for sequence in self._waiting[pull]
            if sequence.sequence_id in self._behind
        ]
        self._go_on(pull)
        del self._waiting[pull]
        for name in pull.names:
            del self._under_way[name]
        return following

    def _go_on(self, pull: Pull) -> None:
        pull.is_cancelled = True
        for sequence in self._waiting[pull]:
            sequence.is_pulling = False
            sequence.cached_at_submit = len(self._tables.match(sequence)) * self._tables.block_size
            del self._pull_of[sequence.sequence_id]
            self._behind.pop(sequence.sequence_id, None)
        self._waiting[pull].clear()

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """Raise AssertionError where pulls, names and waiting sequences disagree."""
        pulling = [sequence.sequence_id for sequence in waiting if sequence.is_pulling]
        assert sorted(pulling) == sorted(self._pull_of)
        assert self._behind.keys() <= self._pull_of.keys()
        assert {id(pull) for pull in self._pull_of.values()} <= {id(pull) for pull in self._waiting}
        assert all(
            bool(waiters) is not pull.is_cancelled
            for pull, waiters in self._waiting.items()
            if waiters or not pull.is_ordered
        )
        fetched = [name for pull in self._waiting for name in pull.names]
        assert len(fetched) == len(set(fetched))
        assert set(fetched) == self._under_way.keys()


class PullRates:
    """Moving averages of the set-up of pulls, and of the rate at which their bytes arrive. Both are 0 until one was
    measured."""

    def __init__(self) -> None:
        self.setup_seconds = 0.0
        """Time of a pull without that of its bytes: until its source answers, and until the engine takes the blocks.

        Both engines do that between two steps.
        """
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Rate after the answer. Each transfer counts by its time, so a short one of a few blocks says little."""
        return self._bytes / self._seconds if self._seconds else 0.0

    def answered(self, setup_seconds: float, num_bytes: float, transfer_seconds: float) -> None:
        """Add a pull that its source answered, and the bytes that have arrived. Time may have ended it."""
        if self.setup_seconds:
            setup_seconds = self.setup_seconds + (1 - KEPT_SHARE) * (setup_seconds - self.setup_seconds)
        self.setup_seconds = max(setup_seconds, LEAST_SECONDS)
        self._bytes = KEPT_SHARE * self._bytes + num_bytes
        self._seconds = KEPT_SHARE * self._seconds + max(transfer_seconds, LEAST_SECONDS)

    def unanswered(self, seconds: float) -> None:
        """Add a pull whose time ran out before an answer. The set-up takes longer than `seconds`."""
        if seconds > self.setup_seconds > 0:
            self.setup_seconds += (1 - KEPT_SHARE) * (seconds - self.setup_seconds)
