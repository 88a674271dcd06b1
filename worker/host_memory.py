"""Host memory as places for blocks: swapped sequences, and named blocks that the GPU's pool has evicted.

Two parts that never lend each other anything: `SwapSpace` holds what preempted sequences computed, until they run
again; `HostCache` holds named blocks in order of their last use. Pure: says which block goes to which slot. Moving the
bytes is the runner's (StepPlan.to_host, from_host).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockyard.worker.sequence import BlockName, HostSlot
from blockyard.worker.tiers import AnywhereNames


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedBlocks:
    """What a preempted sequence had from some block on, in host memory."""

    first_block: int
    """Blocks before it were shared: they are found again by name, or not at all."""
    slots: tuple[HostSlot, ...]
    num_tokens: int
    """Tokens that were computed."""


class SwapSpace:
    """Slots 0 .. num_slots - 1."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = [HostSlot(slot) for slot in reversed(range(num_slots))]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[HostSlot, ...] | None:
        """So many slots; None, without side effect, where there are not as many."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def release(self, slots: Iterable[HostSlot]) -> None:
        self._free.extend(slots)


class HostCache:
    """Slots `first_slot` and following. Evicted is the longest unused name that no step is reading.

    A child is always older than its parent here, because blocks leave the GPU leaf first and are touched leaf first:
    so what is left is closed under prefixes, together with what the GPU holds.
    """

    def __init__(self, num_slots: int, *, first_slot: int, anywhere: AnywhereNames) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        self._anywhere = anywhere
        self._free = [HostSlot(first_slot + slot) for slot in reversed(range(num_slots))]
        self._slots = OrderedDict[BlockName, HostSlot]()
        self._reading: dict[BlockName, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def store(self, name: BlockName) -> HostSlot | None:
        """Where a block that the GPU is about to lose goes; None where it is here already, or nothing can go."""
        if name in self._slots:
            self._slots.move_to_end(name)
            return None
        if not self._free and not self._evict():
            return None
        slot = self._slots[name] = self._free.pop()
        self._anywhere.add(name)
        return slot

    def _evict(self) -> bool:
        for name in self._slots:
            if name not in self._reading:
                self._forget(name)
                self.num_evictions += 1
                return True
        return False

    def _forget(self, name: BlockName) -> None:
        self._free.append(self._slots.pop(name))
        self._anywhere.remove(name)

    def match(self, names: Sequence[BlockName]) -> list[BlockName]:
        """The leading names that are here."""
        found = []
        for name in names:
            if name not in self._slots:
                break
            found.append(name)
        return found

    def read(self, names: Sequence[BlockName]) -> list[HostSlot]:
        """Slots that the next step reads: kept until `done`, and most recently used."""
        for name in reversed(names):
            self._slots.move_to_end(name)
            self._reading[name] = self._reading.get(name, 0) + 1
        return [self._slots[name] for name in names]

    def done(self, names: Iterable[BlockName]) -> None:
        """The step that read them is over."""
        for name in names:
            self._reading[name] -= 1
            if not self._reading[name]:
                del self._reading[name]

    def clear(self) -> None:
        """After a failed step nobody knows what was written."""
        for name in tuple(self._slots):
            self._forget(name)

    def check_invariants(self) -> None:
        """Raises AssertionError where slots are lost or held twice. O(slots)."""
        held = [*self._free, *self._slots.values()]
        assert len(held) == len(set(held)) == self.num_slots
        assert self._reading.keys() <= self._slots.keys() or not self._slots
