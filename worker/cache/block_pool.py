"""Block pool: reference counts of KV blocks, and queues of blocks without references.

Every block is in exactly one of three states, and `free + cached + used == total` at every moment:

    free    no references, and no content worth finding
    cached  no references, but the prefix cache can find it
    used    one reference or more


A cached block is evicted only once no block is free. The pool knows neither names nor tensors. The prefix cache marks
the blocks that are worth keeping and their tenant, and the pool calls it at evictions. Which tenant gives up a block is
decided in tenant_shares.py; among its blocks the one with the lowest odds of reuse goes (reuse_odds.py). All
operations are O(1) a block, an eviction O(log tenants).
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum

from blockyard.worker.cache.pauses import BUCKET_SECONDS, NOT_PAUSED
from blockyard.worker.cache.reuse_odds import AFTER_REUSE, COMPUTED, GENERATED, KINDS, ReuseOdds
from blockyard.worker.cache.tenant_shares import Account, TenantShares
from blockyard.worker.sequences.identifiers import NOBODY, BlockId, TenantId


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    USED = "used"


class NoFreeBlocks(Exception):
    """The pool does not have this many blocks now. Nothing was changed."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1.

    `on_evict` is called with a cached block just before it is reused or flushed. It returns the name that is lost with
    the block, or None.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        """Cached blocks that `allocate` reused. A flush evicts none."""
        self.on_evict: Callable[[BlockId], Hashable | None] = lambda block: None
        self._references = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        self._free = OrderedDict[BlockId, None].fromkeys(self.blocks())
        self._shares = TenantShares[BlockId](len(KINDS))
        """Accounts of the kept blocks by tenant. Those that are cached are offered, in a queue per kind."""
        self._odds = ReuseOdds(num_blocks)
        self._lost, self._is_watched = self._odds.lost, self._odds.is_watched
        self._kinds = bytearray(num_blocks)
        """The kind of each block that is kept or just evicted."""
        self._last_uses = array("Q", bytes(8 * num_blocks))
        """The time of the last release of each block that is cached or just evicted."""
        self._no_account = Account[BlockId](NOBODY)
        self._accounts = [self._no_account] * num_blocks
        """The account of each block that is kept or just evicted. Without meaning for others."""
        self._run_account = self._no_account
        self._run = self._no_account.offered[0]
        self._run_last_use = 0
        """The account, queue and last use of the last eviction. What was released together is evicted in one run, so
        that few choices are made."""
        self._num_used = 0
        self.now_seconds = 0.0
        """The current time. The engine's loop sets it at each step: this class reads no clock."""
        self._buckets = array("l", [NOT_PAUSED] * num_blocks)
        """The bucket of each block's pause. A used block keeps it until its release."""
        self._is_shared_pause = bytearray(num_blocks)
        self._num_paused = 0
        """Blocks with a bucket, used or cached."""

    @property
    def has_pauses(self) -> bool:
        """Return whether a next use is expected of any block."""
        return self._num_paused > 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self.num_allocatable - len(self._free)

    @property
    def num_used(self) -> int:
        return self._num_used

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` could give now: the free and the cached."""
        return self.num_blocks - self._num_used

    def blocks(self) -> Iterable[BlockId]:
        """Return every block, in order."""
        return map(BlockId, range(self.num_blocks))

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def state(self, block: BlockId) -> BlockState:
        if self._references[block]:
            return BlockState.USED
        return BlockState.CACHED if self._kept[block] else BlockState.FREE

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks with one reference each: free blocks first, then cached ones of the tenant that holds
        most.

        Raises NoFreeBlocks, without any side effect, where there are too few.
        """
        free, references = self._free, self._references
        if count > self.num_blocks - self._num_used:
            raise NoFreeBlocks(f"{count} blocks wanted, {self.num_allocatable} can be had")
        odds = self._odds
        odds.now += count
        if odds.now >= odds.refresh_at:
            odds.refresh(self.now_seconds)
        blocks = []
        for _ in range(count):
            if free:
                block = free.popitem(last=False)[0]
            else:
                block = self._evict()
                self.num_evictions += 1
            references[block] = 1
            blocks.append(block)
        self._num_used += count
        return blocks

    def _evict(self) -> BlockId:
        account, queue = self._shares.give(), self._run
        if account is not self._run_account or not queue:
            queue = self._choose_run(account)
        block = queue.popitem(last=False)[0]
        last_use = self._last_uses[block]
        if last_use != self._run_last_use:
            queue[block] = None
            queue.move_to_end(block, last=False)
            block = self._choose_run(account).popitem(last=False)[0]
            last_use = self._run_last_use
        if self._buckets[block]:
            last_use = self._odds.now - self._unused(self._buckets[block], block)
            account.pauses.num -= 1
            self._forget_pause(block)
        self._kept[block] = 0
        name = self.on_evict(block)
        if name is not None:
            self._lost[name] = last_use << 3 | self._is_watched[block] << 2 | self._kinds[block]
        return block

    def _choose_run(self, account: Account[BlockId]) -> OrderedDict[BlockId, None]:
        """Choose the queue whose first block has the lowest odds. Of equal ones, the longest unused goes.

        A block that is due at a time has the odds of one that was used as long ago. A shared pause has those of a block
        just used. On equal odds what is due goes first, and a shared pause last: it may be the parent of the others.
        """
        lowest, pauses = 2.0, account.pauses
        if pauses.num:
            self._end_pauses(account)
        for bucket, queue in pauses.farthest() if pauses.num else ():
            block = next(iter(queue))
            odds = self._odds.of(self._kinds[block], self._odds.now - self._unused(bucket, block))
            if odds < lowest:
                self._run, self._run_last_use, lowest = queue, self._last_uses[block], odds
        for kind, queue in enumerate(account.offered):
            if queue:
                last_use = self._last_uses[next(iter(queue))]
                odds = self._odds.of(kind, last_use)
                if odds < lowest or (odds == lowest and last_use < self._run_last_use):
                    self._run, self._run_last_use, lowest = queue, last_use, odds
        if pauses.num and (shared := pauses.first_shared()) is not None:
            block = next(iter(shared[1]))
            if self._odds.of(self._kinds[block], self._odds.now) < lowest:
                self._run, self._run_last_use = shared[1], self._last_uses[block]
        self._run_account = account
        return self._run

    def _unused(self, bucket: int, block: BlockId) -> int:
        """Return the allocations until a block is due: none for a shared pause.

        While the pace is unknown, return those since its last use.
        """
        if self._is_shared_pause[block]:
            return 0
        if not self._odds.allocations_a_second:
            return self._odds.now - self._last_uses[block]
        seconds = max(0.0, bucket * BUCKET_SECONDS - self.now_seconds)
        return min(int(seconds * self._odds.allocations_a_second), self._odds.now)

    def _end_pauses(self, account: Account[BlockId]) -> None:
        """Make blocks whose time has passed the most recently used ones of their kind."""
        for block in account.pauses.pop_passed(self.now_seconds):
            self._forget_pause(block)
            self._last_uses[block] = self._odds.now
            account.offered[self._kinds[block]][block] = None

    def _forget_pause(self, block: BlockId) -> None:
        self._buckets[block] = NOT_PAUSED
        self._num_paused -= 1

    def _withdraw(self, block: BlockId) -> None:
        """Take a cached block out of its queue."""
        account, bucket = self._accounts[block], self._buckets[block]
        if bucket:
            account.pauses.remove(
                block, bucket, self._kinds[block], is_shared=bool(self._is_shared_pause[block])
            )
        else:
            del account.offered[self._kinds[block]][block]

    def flush(self) -> int:
        """Turn every cached block into a free one, in the order of eviction, and return how many."""
        blocks = [self._evict() for _ in range(self.num_cached)]
        self._lost.clear()
        self._free.update(dict.fromkeys(blocks))
        return len(blocks)

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each of these blocks, used or cached, which a prompt has found."""
        references, accounts, kinds = self._references, self._accounts, self._kinds
        num_taken, buckets, num_paused = 0, self._buckets, self._num_paused
        for block in blocks:
            kind = kinds[block]
            if not references[block]:
                assert self._kept[block], "a free block holds nothing to share"
                bucket = buckets[block] if num_paused else NOT_PAUSED
                if bucket:
                    self._withdraw(block)
                else:
                    del accounts[block].offered[kind][block]
                num_taken += 1
                if self._is_watched[block]:
                    waited = self._odds.now - self._unused(bucket, block)
                    self._odds.reused(kind, waited if bucket else self._last_uses[block])
            references[block] += 1
            kinds[block] = AFTER_REUSE[kind]
        self._num_used += num_taken

    def fork(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each of these used blocks, for another sequence of the same request."""
        for block in blocks:
            assert self._references[block], "only used blocks can be forked"
            self._references[block] += 1

    def release(
        self, blocks: Sequence[BlockId], *, bucket: int = NOT_PAUSED, first_alone: int | None = None
    ) -> None:
        """Give back one reference of each block, from the last to the first.

        So a sequence's tail is evicted before its head, and what stays cached is always a prefix. For this, a block's
        kind must not be below that of a later block, which may have been found beside another copy of this block.

        The blocks are expected to be needed again in `bucket`. From index `first_alone` on no other chain builds on
        them. The blocks before are needed by others too, until the last time that anyone has named.
        """
        if bucket or self._num_paused:
            self._note_pauses(blocks, bucket, len(blocks) if first_alone is None else first_alone)
        references, kept, accounts, free = self._references, self._kept, self._accounts, self._free
        kinds, last_uses, buckets = self._kinds, self._last_uses, self._buckets
        num_left, account, least_kind, num_paused = 0, self._no_account, 0, self._num_paused
        self._odds.now += 1
        now = self._odds.now
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, "released more often than taken"
            references[block] = left
            if kept[block]:
                if kinds[block] < least_kind:
                    kinds[block] = least_kind
                else:
                    least_kind = kinds[block]
            if left:
                num_left += 1
                continue
            if not kept[block]:
                free[block] = None
                continue
            if accounts[block] is not account:
                account = accounts[block]
                self._shares.offers(account)
            last_uses[block] = now
            if num_paused and buckets[block]:
                is_shared = bool(self._is_shared_pause[block])
                account.pauses.add(block, buckets[block], kinds[block], is_shared=is_shared)
            else:
                account.offered[kinds[block]][block] = None
        self._num_used -= len(blocks) - num_left

    def _note_pauses(self, blocks: Sequence[BlockId], bucket: int, first_alone: int) -> None:
        """Write down when blocks to be released are due. A block is never due before those that build on it."""
        last = bucket
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            if self._kept[block]:
                is_shared = index < first_alone
                before = self._buckets[block]
                last = max(last, before) if is_shared else last
                self._num_paused += bool(last) - bool(before)
                self._buckets[block], self._is_shared_pause[block] = last, is_shared

    def keep(
        self,
        block: BlockId,
        tenant: TenantId = NOBODY,
        *,
        name: Hashable = None,
        is_generated: bool = False,
    ) -> None:
        """Mark a used block as worth finding again, on the tenant's account. Once it has no references, it is
        cached, not free.

        `name` is what `on_evict` would return. `is_generated` says whether the block holds generated tokens.
        """
        assert self._references[block], "only a used block can become worth keeping"
        assert not self._kept[block], "it is on an account already"
        self._kept[block] = 1
        if name in self._lost:
            self._kinds[block] = self._odds.computed(name)
        else:
            self._kinds[block] = GENERATED if is_generated else COMPUTED
        self._accounts[block] = self._shares.hold(tenant)

    def discard(self, block: BlockId) -> None:
        """Undo `keep`. A block without references turns from cached to free."""
        if not self._kept[block]:
            return
        self._kept[block] = 0
        if not self._references[block]:
            self._withdraw(block)
            self._free[block] = None
        if self._buckets[block]:
            self._forget_pause(block)
        self._shares.drop(self._accounts[block])

    def owner(self, block: BlockId) -> TenantId:
        """Return the tenant of a block that is kept, or that `on_evict` is called with."""
        return self._accounts[block].tenant

    def num_cached_by_others(self, tenant: TenantId) -> int:
        """Return how many cached blocks are not on the tenant's account."""
        return self.num_cached - self._shares.num_offered(tenant)

    def snapshot(self) -> tuple[list[int], bytes]:
        """Return copies of every block's references and of whether it is kept."""
        return list(self._references), bytes(self._kept)

    def check_invariants(self) -> None:
        """Raise AssertionError where the pool contradicts itself. O(blocks)."""
        self._shares.check_invariants()
        assert self._num_used == sum(references > 0 for references in self._references)
        held = Counter(self.owner(block) for block in self.blocks() if self._kept[block])
        assert held == self._shares.num_held(), "the accounts do not add up"
        for block, references in zip(self.blocks(), self._references, strict=True):
            is_cached = self._kept[block] and self._is_offered(block)
            num_states = (references > 0) + (block in self._free) + is_cached
            assert references >= 0, f"block {block} has {references} references"
            assert num_states == 1, f"block {block} is in {num_states} states"
            assert block not in self._free or not self._kept[block], f"block {block} is free with a name"
            assert self._kept[block] or not self._buckets[block], f"block {block} is due without a name"
        assert self._num_paused == sum(bucket != NOT_PAUSED for bucket in self._buckets)

    def _is_offered(self, block: BlockId) -> bool:
        account, bucket = self._accounts[block], self._buckets[block]
        if bucket:
            return account.pauses.has(
                block, bucket, self._kinds[block], is_shared=bool(self._is_shared_pause[block])
            )
        return block in account.offered[self._kinds[block]]
