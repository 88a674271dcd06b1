"""Host memory: slots for swapped sequences, and for named blocks that the GPU's pool has evicted.

The two parts never lend each other slots. The `SwapSpace` holds what preempted sequences computed, until they run
again. The `HostCache` holds named blocks in order of their last use, and blocks on their way from other workers. Pure:
it chooses the slot of each block. The runner moves the bytes (StepPlan.to_host, from_host), or a pull receives them
(../transfer/).
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set

from blockyard.worker.cache.tenant_shares import Account, TenantShares
from blockyard.worker.cache.tier_names import AnywhereNames
from blockyard.worker.sequences.identifiers import NOBODY, BlockName, HostSlot, TenantId


class SwapSpace:
    """Slots 0 .. num_slots - 1."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = [HostSlot(slot) for slot in reversed(range(num_slots))]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[HostSlot, ...] | None:
        """Return `count` slots, or None, without side effect, where there are too few."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def release(self, slots: Iterable[HostSlot]) -> None:
        self._free.extend(slots)


class HostCache:
    """Named blocks in slots `first_slot` and following.

    It evicts the least recently used name that no step is reading, of the tenant that holds most. All names that begin
    with one block belong to one tenant. Among them a child is always older than its parent here, because blocks leave
    the GPU and are touched leaf first. So what is left, together with what the GPU holds, is closed under prefixes.

    A block from another worker is evicted first once the GPU has loaded it: the GPU and the other worker have it then.
    So it may go before its children. It is like any other block when the GPU evicts it.
    """

    def __init__(self, num_slots: int, *, first_slot: int, anywhere: AnywhereNames) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        self._anywhere = anywhere
        self._free = [HostSlot(first_slot + slot) for slot in reversed(range(num_slots))]
        self._slots: dict[BlockName, HostSlot] = {}
        self._parents: dict[BlockName, BlockName | None] = {}
        self._accounts: dict[BlockName, Account[BlockName]] = {}
        self._shares = TenantShares[BlockName]()
        """Accounts by tenant. Names that no step is reading are offered."""
        self._reading: dict[BlockName, int] = {}
        self._dropped: dict[BlockName, list[HostSlot]] = {}
        """Slots of names that were dropped while something read them. They are free once nothing does."""
        self._reserved: set[HostSlot] = set()
        self._pulled: set[BlockName] = set()
        """Names that came from other workers, until the GPU has loaded and evicted them."""

    def __len__(self) -> int:
        return len(self._slots)

    def owner(self, name: BlockName) -> TenantId | None:
        """Return the tenant of a name, or None where host memory does not hold the name."""
        account = self._accounts.get(name)
        return None if account is None else account.tenant

    def store(
        self, name: BlockName, tenant: TenantId = NOBODY, *, parent: BlockName | None = None
    ) -> HostSlot | None:
        """Take a slot for a block that the GPU is about to lose, and return it.

        Return None where the name is here already, or nothing can be evicted. Then names that build on it go too.
        """
        self._pulled.discard(name)
        if name in self._slots:
            self._touch(name)
            return None
        if not self._free and not self._evict():
            for descendant in reversed(self._with_descendants({name})[1:]):
                self._drop(descendant)
            return None
        slot = self._slots[name] = self._free.pop()
        self._parents[name] = parent
        self._accounts[name] = self._shares.hold(tenant)
        self._touch(name)
        self._anywhere.add(name)
        return slot

    def reserve(self, count: int) -> list[HostSlot]:
        """Take slots that nothing else sees, to receive blocks in them. Return at most `count`, and never more than
        half of all slots in all."""
        slots: list[HostSlot] = []
        while len(slots) < count and len(self._reserved) < self.num_slots // 2:
            if not self._free and not self._evict():
                break
            slots.append(self._free.pop())
            self._reserved.add(slots[-1])
        return slots

    def commit(
        self,
        name: BlockName,
        slot: HostSlot,
        tenant: TenantId = NOBODY,
        *,
        parent: BlockName | None,
        is_indexed: bool,
    ) -> None:
        """Give a reserved slot, which now holds a block, its name. As after `read`, nothing evicts the name until
        `done`.

        Where another slot has the name already, the reserved one becomes free. Commit a parent before its children.
        """
        self._reserved.remove(slot)
        if name in self._slots:
            self._free.append(slot)
        else:
            self._slots[name] = slot
            self._parents[name] = parent
            self._accounts[name] = self._shares.hold(tenant)
            self._anywhere.add(name, is_indexed=is_indexed)
            self._pulled.add(name)
        self.read([name])

    def release(self, slots: Iterable[HostSlot]) -> None:
        """Give reserved slots back."""
        for slot in slots:
            self._reserved.remove(slot)
            self._free.append(slot)

    def _touch(self, name: BlockName, *, is_first: bool = False) -> None:
        """Make a name the most recently used, or the first to be evicted. Where a step is reading it, that happens at
        the step's end."""
        if name not in self._reading:
            account = self._accounts[name]
            account.offered[0][name] = None
            account.offered[0].move_to_end(name, last=not is_first)
            self._shares.offers(account)

    def _evict(self) -> bool:
        if not self._shares.can_give:
            return False
        self._free_slot(self._shares.give().offered[0].popitem(last=False)[0])
        self.num_evictions += 1
        return True

    def _free_slot(self, name: BlockName) -> None:
        del self._accounts[name], self._parents[name]
        self._pulled.discard(name)
        slot = self._slots.pop(name)
        if name in self._reading:
            self._dropped.setdefault(name, []).append(slot)
        else:
            self._free.append(slot)
        self._anywhere.remove(name)

    def match(self, names: Sequence[BlockName]) -> list[BlockName]:
        """Return the leading names that are here."""
        found = []
        for name in names:
            if name not in self._slots:
                break
            found.append(name)
        return found

    def read(self, names: Sequence[BlockName]) -> list[HostSlot]:
        """Return the slots of these names, for a step or a loan to read. No slot changes until `done`."""
        for name in names:
            self._reading[name] = self._reading.get(name, 0) + 1
            self._accounts[name].offered[0].pop(name, None)
        return [self._slots[name] for name in names]

    def done(self, names: Sequence[BlockName], *, are_loaded: bool = False) -> None:
        """Release names that were read. They become the most recently used, the first of the list last.

        Those that `are_loaded` to the GPU, and came from another worker, are evicted first, the last of the list first.
        """
        spare = [name for name in names if are_loaded and name in self._pulled]
        for name in reversed(names):
            self._reading[name] -= 1
            if not self._reading[name]:
                del self._reading[name]
                self._free += self._dropped.pop(name, ())
                if name in self._slots:
                    self._touch(name)
        for name in spare:
            self._touch(name, is_first=True)

    def clear(self) -> None:
        """Drop all names: for a flush, or after a failed step, when it is unknown what was written. Slots that are
        read become free later."""
        for name in tuple(self._slots):
            self._drop(name)

    def drop(self, slots: Set[HostSlot]) -> None:
        """Drop the names in these slots and their descendants, a child before its parent. O(slots)."""
        lost = {name for name, slot in self._slots.items() if slot in slots}
        for name in reversed(self._with_descendants(lost) if lost else ()):
            self._drop(name)

    def _with_descendants(self, names: Set[BlockName]) -> list[BlockName]:
        """Return the names and their descendants, a parent before its children."""
        children: dict[BlockName | None, list[BlockName]] = {}
        for name, parent in self._parents.items():
            children.setdefault(parent, []).append(name)
        found: dict[BlockName, None] = {}
        following = deque(name for name in names if self._parents.get(name) not in names)
        while following:
            name = following.popleft()
            found.pop(name, None)  # one of the names is a descendant of another: it moves behind that one
            found[name] = None
            following.extend(children.get(name, ()))
        return list(found)

    def _drop(self, name: BlockName) -> None:
        account = self._accounts[name]
        account.offered[0].pop(name, None)
        self._shares.drop(account)
        self._free_slot(name)

    def check_invariants(self) -> None:
        """Raise AssertionError where slots are lost or held twice. O(slots)."""
        dropped = [slot for slots in self._dropped.values() for slot in slots]
        held = [*self._free, *self._slots.values(), *self._reserved, *dropped]
        assert len(held) == len(set(held)) == self.num_slots
        self._shares.check_invariants()
        assert self._accounts.keys() == self._parents.keys() == self._slots.keys()
        for name, account in self._accounts.items():
            assert (name in account.offered[0]) is (name not in self._reading)
        assert Counter(account.tenant for account in self._accounts.values()) == self._shares.num_held()
        assert self._pulled <= self._slots.keys()
        assert self._dropped.keys() <= self._reading.keys() <= self._slots.keys() | self._dropped.keys()
