"""Table of loads: a row of numbers for each worker, so that a placement looks at all workers at once.

Owns the slots. A row changes with each report and booking of its worker. Does not own the arithmetic
(placement/columns.py), the choice of a few workers (shortlist.py) or the state from which rows follow (view.py).
"""

from collections.abc import Mapping
from hashlib import blake2b
from weakref import WeakKeyDictionary

import numpy as np
from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.proto.index.holders import Numbers, Roster
from blockyard.router.cluster.depths import BerthDepths, BerthSlots, CachedDepth
from blockyard.router.placement.columns import Column, Columns
from numpy.typing import NDArray

FIRST_SLOTS = 64
_HEARD, _FIRST = 0, 1
_SLOWNESS = _FIRST + Columns._fields.index("slowness")
_NUM_COLUMNS = _FIRST + len(Columns._fields)
NEVER = float("-inf")


class LoadTable:
    """Rows of workers by slot. A worker keeps its slot until it is removed."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        """Addresses by slot. Empty: the slot is free."""
        self.slots: dict[str, int] = {}
        self._owners: dict[str, tuple[WorkerId, Incarnation]] = {}
        self._free: list[int] = []
        self._adapters: dict[str, frozenset[str]] = {}
        """Fingerprints of the LoRA adapters at hand, by address. Workers without any are left out."""
        self._adapter_holders: dict[str, set[str]] = {}
        self._rows = np.zeros((_NUM_COLUMNS, FIRST_SLOTS))
        self._hashes = np.zeros(FIRST_SLOTS, np.uint64)
        self._by_worker: dict[WorkerId, list[int]] | None = None
        """Slots by worker id. None after an owner has changed."""
        self._berths = WeakKeyDictionary[Roster, BerthSlots]()
        """The slots of the berths of each roster in use. Each server of the index has one."""

    def __len__(self) -> int:
        return len(self.addresses)

    def put(
        self,
        address: str,
        owner: tuple[WorkerId, Incarnation],
        heard_at: float,
        row: tuple[float, ...],
        adapters: frozenset[str] = frozenset(),
    ) -> None:
        """Write a worker's row, and the fingerprints of its LoRA adapters. A worker that must get no request was heard
        NEVER."""
        slot = self.slots.get(address)
        if slot is None:
            slot = self._take(address)
        if self._owners.get(address) != owner:
            self._owners[address] = owner
            self._hashes[slot] = int.from_bytes(blake2b(owner[0].encode(), digest_size=8).digest())
            self._by_worker = None
            self._berths.clear()
        self._rows[:, slot] = (heard_at, *row)
        self._set_adapters(address, adapters)

    def close(self, address: str) -> None:
        """Let a worker get no request until its next row."""
        if (slot := self.slots.get(address)) is not None:
            self._rows[_HEARD, slot] = NEVER

    def remove(self, address: str) -> None:
        if (slot := self.slots.pop(address, None)) is not None:
            self._set_adapters(address, frozenset())
            self._rows[:, slot] = 0.0
            self._rows[_HEARD, slot] = NEVER
            self.addresses[slot] = ""
            self._owners.pop(address)
            self._free.append(slot)
            self._by_worker = None
            self._berths.clear()

    def heard_since(self, time: float) -> Numbers:
        """Return the slots of workers that were heard after this time."""
        return np.flatnonzero(self._rows[_HEARD, : len(self)] > time)

    def set_slowness(self, address: str, slowness: float) -> None:
        """Change the slowness of a worker that has a row."""
        if (slot := self.slots.get(address)) is not None:
            self._rows[_SLOWNESS, slot] = slowness

    def columns(self, slots: Numbers) -> Columns:
        rows = self._rows[_FIRST:, : len(self)]
        return Columns(*(rows if len(slots) == len(self) else rows[:, slots]))

    def depths(self, depths: Mapping[WorkerId, CachedDepth]) -> tuple[Column, Column]:
        """Return the blocks that the index knows on the GPU and anywhere, by slot."""
        if isinstance(depths, BerthDepths):
            return depths.by_slot(self._slots_of(depths.roster), len(self))
        on_gpu, anywhere = np.zeros(len(self)), np.zeros(len(self))
        for worker_id, depth in depths.items():
            for slot in self._slots_by_worker().get(worker_id, ()):
                on_gpu[slot], anywhere[slot] = depth.blocks, depth.blocks + depth.host_blocks
        return on_gpu, anywhere

    def of_worker(self, worker_id: WorkerId) -> list[int]:
        return self._slots_by_worker().get(worker_id, [])

    def with_adapter(self, fingerprint: str) -> set[str]:
        """Return the addresses of the workers that have this adapter at hand."""
        return self._adapter_holders.get(fingerprint, set())

    def _set_adapters(self, address: str, adapters: frozenset[str]) -> None:
        before = self._adapters.get(address, frozenset())
        if adapters == before:
            return
        for fingerprint in before - adapters:
            self._adapter_holders[fingerprint].discard(address)
            if not self._adapter_holders[fingerprint]:
                del self._adapter_holders[fingerprint]
        for fingerprint in adapters - before:
            self._adapter_holders.setdefault(fingerprint, set()).add(address)
        if adapters:
            self._adapters[address] = adapters
        else:
            del self._adapters[address]

    def ranks(self, key: bytes, slots: Numbers) -> NDArray[np.uint64]:
        """Return the place of each worker in the order that this key has on every router."""
        salt = np.uint64(int.from_bytes(blake2b(key, digest_size=8).digest()))
        mixed = (self._hashes[slots] ^ salt) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)

    def _take(self, address: str) -> int:
        if self._free:
            slot = self._free.pop()
            self.addresses[slot] = address
        else:
            slot = len(self.addresses)
            self.addresses.append(address)
            if slot == self._rows.shape[1]:
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=1)
                self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
            self._berths.clear()
        self.slots[address] = slot
        return slot

    def _slots_by_worker(self) -> dict[WorkerId, list[int]]:
        if self._by_worker is None:
            self._by_worker = {}
            for address, (worker_id, _) in self._owners.items():
                self._by_worker.setdefault(worker_id, []).append(self.slots[address])
        return self._by_worker

    def _slots_of(self, roster: Roster) -> BerthSlots:
        if (slots := self._berths.get(roster)) is None:
            owners = {owner: self.slots[address] for address, owner in self._owners.items()}
            slots = self._berths[roster] = BerthSlots.of(roster, owners, len(self))
        return slots
