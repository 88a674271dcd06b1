"""Block tables: which blocks each sequence holds, from admission over forks and swaps to release.

Owns every change of a sequence's block table and the moves before the next step. These are copies of half-filled blocks
that forks share, and blocks to and from host memory. A step's moves stay protected until it ends: no source of a copy
is reused, and no host slot that is read is overwritten. Does not decide which sequence runs or is preempted.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf

from blockyard.proto.naming.block_hash import chain
from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.host_memory import HostCache, SwapSpace
from blockyard.worker.cache.pauses import NOT_PAUSED, bucket_of
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.sequences.identifiers import BlockId, BlockName, HostSlot, SwappedBlocks, TenantId
from blockyard.worker.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Hits:
    """Leading blocks of a sequence that need not be computed: on the GPU, then in host memory."""

    blocks: list[BlockId]
    host_names: list[BlockName]

    def __len__(self) -> int:
        return len(self.blocks) + len(self.host_names)


@dataclass(slots=True, eq=False)
class Loan:
    """Leading blocks of a prefix that are kept for a reader, first on the GPU, then in host memory.

    Nothing evicts or changes them until `BlockTables.end_loan`.
    """

    blocks: list[BlockId]
    host_names: list[BlockName]
    host_slots: list[HostSlot]
    num_unsent: int = 0
    """Blocks that the reader still waits for. After it has the loan, only the thread that sends changes the numbers."""
    num_sent: int = 0

    def __len__(self) -> int:
        return len(self.blocks) + len(self.host_names)


@dataclass(slots=True)
class Moves:
    """The block moves of one step, and what stays protected in host memory until the step ends."""

    to_host: dict[HostSlot, BlockId] = field(default_factory=dict)
    """Keyed by slot: a small host cache may evict a name in the same step in which it was to be stored."""
    from_host: list[tuple[HostSlot, BlockId]] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    """Pairs (source, destination)."""
    read_names: list[BlockName] = field(default_factory=list)
    """Names that the step reads from the host cache."""
    read_slots: list[HostSlot] = field(default_factory=list)
    """Slots that the step reads from the swap space."""

    def __bool__(self) -> bool:
        return bool(self.to_host or self.from_host or self.copies)


class BlockTables:
    """Block tables over one pool. Moves gather until `take_moves`. `release_moves` frees what they hold."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        block_size: int,
        swap: SwapSpace,
        host_cache: HostCache | None,
        *,
        index_stride_blocks: int = 1,
    ) -> None:
        """Only every `index_stride_blocks`-th block of a prefix is published to the prefix index."""
        self.pool = pool
        self.cache = cache
        self.block_size = block_size
        self.swap = swap
        self.host_cache = host_cache
        self._index_stride_blocks = index_stride_blocks
        self._moves = Moves()
        self._copied = Counter[BlockId]()
        """References held by copies under way, for each source."""
        self._lent = Counter[BlockId]()
        """References held by loans."""
        if host_cache is not None:
            cache.on_lost = self._offload

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _offload(self, block: BlockId, name: BlockName, parent: BlockName | None) -> None:
        assert self.host_cache is not None
        slot = self.host_cache.store(name, self.pool.owner(block), parent=parent)
        if slot is not None:
            self._moves.to_host[slot] = block

    # Growing

    def missing(self, sequence: Sequence, end: int) -> int:
        """Return how many blocks a sequence must take before positions below `end` can be written.

        The copy of a half-filled block that it shares counts too. A negative number means that blocks are left over.
        """
        return self.blocks_for(end) - len(sequence.block_table) + self._must_copy_tail(sequence)

    def _must_copy_tail(self, sequence: Sequence) -> bool:
        """Return whether the block to be written next is half filled and shared with other sequences."""
        table, index = sequence.block_table.blocks, sequence.num_scheduled // self.block_size
        if index >= len(table):
            return False
        references = self.pool.references(table[index])
        return references > 1 and references - self._copied[table[index]] > 1

    def extend(self, sequence: Sequence, end: int) -> None:
        """Take the missing blocks for positions below `end`, and plan the copy of a shared half-filled block.

        Raises NoFreeBlocks, without side effect, where there are too few.
        """
        copies = self._must_copy_tail(sequence)
        blocks = self.pool.allocate(max(0, self.missing(sequence, end)))
        if copies:
            index = sequence.num_scheduled // self.block_size
            source, destination = sequence.block_table[index], blocks.pop()
            # The reference passes from the sequence to the copy, which holds it until the step ends.
            self._moves.copies.append((source, destination))
            self._copied[source] += 1
            sequence.block_table.replace(index, destination)
        sequence.block_table.extend(blocks)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child all blocks of the parent, the half-filled tail too."""
        self.pool.fork(parent.block_table)
        child.block_table.assign(parent.block_table)
        child.num_scheduled, child.num_computed = parent.num_scheduled, parent.num_computed
        child.num_named = parent.num_named
        parent.plain_until = 0

    # Finding and filling

    def match(self, sequence: Sequence) -> Hits:
        """Return the cached blocks of a sequence's leading tokens, none where it wants its whole prompt computed.

        The last token is always computed, for its logits.
        """
        if sequence.wants_whole_prompt:
            return Hits([], [])
        usable = (len(sequence.tokens) - 1) // self.block_size
        names = sequence.names[1 : 1 + usable]
        blocks = self.cache.match(names)
        return Hits(blocks, self.host_cache.match(names[len(blocks) :]) if self.host_cache else [])

    def has(self, names: Items[BlockName]) -> bool:
        """Return whether every one of these leading blocks of a prefix is here."""
        found = len(self.cache.match(names))
        return found == len(names) or (
            self.host_cache is not None and found + len(self.host_cache.match(names[found:])) == len(names)
        )

    def lend(self, names: Items[BlockName], *, most_blocks: float = inf) -> Loan:
        """Keep the leading blocks of a prefix that are here, for a reader, and return them.

        Only blocks that are computed are lent, so their content is final. Of the pool at most `most_blocks` are lent in
        all.
        """
        blocks: list[BlockId] = []
        host_names: list[BlockName] = []
        for block in self.cache.match(names):
            if self.cache.is_unconfirmed(block) or self.num_lent + len(blocks) >= most_blocks:
                break
            blocks.append(block)
        else:
            if self.host_cache is not None:
                host_names = self.host_cache.match(names[len(blocks) :])
        self.pool.share(blocks)
        self._lent.update(blocks)
        host_slots = self.host_cache.read(host_names) if self.host_cache is not None else []
        return Loan(blocks, host_names, host_slots)

    def end_loan(self, loan: Loan) -> None:
        """Give back what `lend` has kept."""
        self._lent.subtract(loan.blocks)
        self._lent = +self._lent
        self.pool.release(loan.blocks)
        if self.host_cache is not None:
            self.host_cache.done(loan.host_names)

    @property
    def num_lent(self) -> int:
        """Return how many references loans hold on blocks of the pool."""
        return self._lent.total()

    def resumes_from(self, sequence: Sequence, hits: Hits) -> bool:
        """Return whether the swapped blocks continue the hits on the GPU without a gap, and go beyond them."""
        swapped, num_found = sequence.swapped, len(hits.blocks)
        return swapped is not None and swapped.first_block <= num_found < self.blocks_for(swapped.num_tokens)

    def start(self, sequence: Sequence, hits: Hits) -> None:
        """Give a sequence without blocks its hits and swapped blocks, and move its counters past them.

        The pool must have room for those that are loaded from host memory.
        """
        swapped = sequence.swapped
        resumes = self.resumes_from(sequence, hits)
        self.pool.share(hits.blocks)
        sequence.block_table.assign(hits.blocks)
        sequence.num_named = len(hits.blocks)
        sequence.num_scheduled = len(hits.blocks) * self.block_size
        if swapped is not None and resumes:
            self._fill(sequence, swapped.slots[len(hits.blocks) - swapped.first_block :])
            sequence.num_scheduled = swapped.num_tokens
            self._moves.read_slots += swapped.slots
        elif hits.host_names:
            assert self.host_cache is not None
            self._fill(sequence, self.host_cache.read(hits.host_names))
            self._moves.read_names += hits.host_names
            sequence.num_scheduled = len(hits) * self.block_size
        if swapped is not None and not resumes:
            self.swap.release(swapped.slots)
        sequence.swapped = None
        sequence.num_computed = sequence.num_scheduled
        self.name_full_blocks(sequence)

    def _fill(self, sequence: Sequence, slots: Iterable[HostSlot]) -> None:
        slots = tuple(slots)
        blocks = self.pool.allocate(len(slots))
        self._moves.from_host += zip(slots, blocks, strict=True)
        sequence.block_table.extend(blocks)

    def note_scheduled(self, sequence: Sequence) -> None:
        """Name the full blocks and update `plain_until`, after positions were scheduled and their blocks taken."""
        self.name_full_blocks(sequence)
        # A plain row samples, and an embedding's does not.
        is_never_plain = sequence.sampling.embeds
        sequence.plain_until = 0 if is_never_plain else len(sequence.block_table) * self.block_size - 1

    def name_full_blocks(self, sequence: Sequence) -> None:
        """Give each unnamed block its name once its last token is scheduled and known."""
        size = self.block_size
        full = min(sequence.num_scheduled, len(sequence.tokens)) // size
        if full <= sequence.num_named:
            return
        self._extend_names(sequence, full)
        owner, table = self._owner(sequence), sequence.block_table
        for index in range(sequence.num_named, full):
            block, name = table[index], sequence.names[index + 1]
            is_indexed = (index + 1) % self._index_stride_blocks == 0
            parent = sequence.names[index] if index else None
            is_generated = (index + 1) * size > sequence.prompt_length
            self.cache.assign(
                block, name, owner, is_indexed=is_indexed, parent=parent, is_generated=is_generated
            )
        sequence.num_named = full

    def name_known_tokens(self, sequence: Sequence) -> None:
        """Compute the names of all full blocks of a sequence's known tokens, so that they can be found elsewhere."""
        self._extend_names(sequence, len(sequence.tokens) // self.block_size)

    def _extend_names(self, sequence: Sequence, full: int) -> None:
        size, known = self.block_size, len(sequence.names) - 1
        if full > known:
            tail = sequence.tokens[known * size : full * size]
            sequence.names.extend(BlockName(name) for name in chain(sequence.names[known], tail, size))

    def _owner(self, sequence: Sequence) -> TenantId:
        """Return the tenant that the sequence's blocks are accounted to: the owner of its first block.

        All blocks that begin with one block have its owner, whichever tenant extends them and wherever they lie. So
        they are evicted in one order, a child before its parent.
        """
        if sequence.num_named:
            return self.pool.owner(sequence.block_table[0])
        return self.owner_of(sequence.names[1], otherwise=sequence.tenant)

    def owner_of(self, first: BlockName, *, otherwise: TenantId) -> TenantId:
        """Return the owner of all blocks that begin with this first block. It is `otherwise` where none is here."""
        owner = self.cache.owner(first)
        if owner is None and self.host_cache is not None:
            owner = self.host_cache.owner(first)
        return otherwise if owner is None else owner

    def confirm(self, sequence: Sequence, computed_from: int) -> None:
        """Publish the names of blocks that are computed, root first. The step began at position `computed_from`.

        Where a block has become full, all blocks are examined. Another sequence that shares a later block, and has its
        own copy of an earlier one, may have confirmed only the later one.
        """
        full = min(sequence.num_computed // self.block_size, sequence.num_named)
        table = sequence.block_table.blocks
        if full and (computed_from // self.block_size < full or self.cache.is_unconfirmed(table[full - 1])):
            self.cache.confirm_all(table[:full])

    # Giving back

    def freed_by(self, sequences: Iterable[Sequence]) -> int:
        """Return how many blocks would lose their last reference if these sequences gave theirs back."""
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        return sum(self.pool.references(block) == count for block, count in held.items())

    def num_shared(self, sequence: Sequence) -> int:
        """Return how many leading blocks of a sequence other sequences hold too."""
        for index, block in enumerate(sequence.block_table):
            if self.pool.references(block) == 1:
                return index
        return len(sequence.block_table)

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back. Those that no step has confirmed lose their names, and are not found again.

        If the sequence is over, they are due when its session is expected back.

        Only an unconfirmed block that another sequence holds keeps its name. So a child's name never outlives its
        parent's.
        """
        self.cache.retract_unshared(sequence.block_table)
        pause = sequence.expected_pause_seconds if sequence.is_over else 0.0
        if pause or self.pool.has_pauses:
            bucket = bucket_of(self.pool.now_seconds + pause) if pause else NOT_PAUSED
            first_alone = self.cache.first_alone(sequence.block_table.blocks)
            self.pool.release(sequence.block_table, bucket=bucket, first_alone=first_alone)
        else:
            self.pool.release(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_named = sequence.num_scheduled = sequence.num_computed = sequence.plain_until = 0
        sequence.num_drafted = 0

    def end_drafts(self, sequence: Sequence) -> None:
        """Give back the blocks behind the scheduled positions, after a step has verified the sequence's drafts."""
        sequence.num_drafted = 0
        kept = self.blocks_for(sequence.num_scheduled)
        surplus = sequence.block_table[kept:]
        if surplus:
            sequence.block_table.assign(sequence.block_table[:kept])
            self.pool.release(surplus)

    def check_plain(self, sequence: Sequence) -> None:
        """Raise AssertionError where positions below `plain_until` are not plain."""
        plain = range(sequence.num_scheduled, sequence.plain_until)
        assert not plain or self.missing(sequence, plain.stop) <= 0, "a block is missing, or is not its own"
        assert plain.stop % self.block_size == self.block_size - 1 or not plain.stop
        assert not plain or plain.stop // self.block_size == len(sequence.block_table) - 1

    def swap_out(self, sequence: Sequence) -> bool:
        """Give a sequence's blocks back, and plan to move those from the first that it alone holds to host memory.

        Returns False, and changes nothing, where host memory has no room.
        """
        assert not sequence.num_in_flight
        first, num_computed = self.num_shared(sequence), sequence.num_computed
        blocks = sequence.block_table[first : self.blocks_for(num_computed)]
        slots = self.swap.allocate(len(blocks))
        if slots is None:
            return False
        self._moves.to_host.update(zip(slots, blocks, strict=True))
        self.release(sequence)
        sequence.swapped = SwappedBlocks(first_block=first, slots=slots, num_tokens=num_computed)
        return True

    def forget_swapped(self, sequence: Sequence) -> None:
        """Free a sequence's slots in the swap space. Its tokens will be computed again."""
        if sequence.swapped is not None:
            self.swap.release(sequence.swapped.slots)
            sequence.swapped = None

    # Steps

    def take_moves(self) -> Moves:
        """Return what the planned step must move. Unless that is nothing, call `release_moves` when the step has
        ended."""
        moves, self._moves = self._moves, Moves()
        return moves

    def release_moves(self, moves: Moves, *, are_loaded: bool) -> None:
        """Release the sources of an ended step's copies, and the host memory that it read.

        `are_loaded` says whether the GPU keeps what the step loaded from host memory.
        """
        for source, _ in moves.copies:
            self._copied[source] -= 1
            if not self._copied[source]:
                del self._copied[source]
            self.pool.release([source])
        self.swap.release(moves.read_slots)
        if self.host_cache is not None:
            self.host_cache.done(moves.read_names, are_loaded=are_loaded)

    def held_beside_sequences(self) -> Counter[BlockId]:
        """Return the references that copies and loans hold, for each block."""
        return self._copied + self._lent
