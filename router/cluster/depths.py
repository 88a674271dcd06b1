"""Depths: what each worker has cached of a prompt, according to one look-up in the index.

Owns the two forms of a look-up's result: one object per worker, and arrays for the table of loads (loads.py). Does not
own the look-up (dispatch/prefix_lookup.py).
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from zlib import crc32

import numpy as np
from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.proto.index.holders import Holders, Numbers, Roster
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedDepth:
    """Number of leading blocks of a prompt that a worker has cached, according to the index."""

    blocks: int = 0
    """Leading blocks on its GPU."""
    host_blocks: int = 0
    """Further blocks that directly follow those and are in its host memory."""


NOTHING_CACHED = CachedDepth()


@dataclass(frozen=True, slots=True)
class BerthSlots:
    """The slot in the table of loads for each berth. Berths of unknown incarnations have the slot after the last."""

    on_gpu: Numbers
    """Slots of first numbers, by berth."""
    anywhere: Numbers
    """Slots of second numbers."""

    @classmethod
    def of(
        cls, roster: Roster, slots: Mapping[tuple[WorkerId, Incarnation], int], num_slots: int
    ) -> "BerthSlots":
        def by_berth(owners: Mapping[int, tuple[WorkerId, Incarnation]]) -> Numbers:
            found = np.full(max(owners, default=0) + 1, num_slots, np.int64)
            for berth, owner in owners.items():
                found[berth] = slots.get(owner, num_slots)
            return found

        return cls(by_berth(roster.on_gpu), by_berth(roster.anywhere))


class BerthDepths(Mapping[WorkerId, CachedDepth]):
    """Depths of the ready incarnations in a reply of Redis. An object is made only for a worker that is asked for."""

    def __init__(
        self, holders: Holders, incarnations: Mapping[WorkerId, Incarnation], stride_blocks: int
    ) -> None:
        self.roster = holders.roster
        self._holders = holders
        self._incarnations = incarnations
        self._stride_blocks = stride_blocks

    def by_slot(self, slots: BerthSlots, num_slots: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the leading blocks on the GPU and anywhere, for each slot of the table of loads."""
        on_gpu, anywhere = (
            self._scattered(by_berth, num_slots) for by_berth in (slots.on_gpu, slots.anywhere)
        )
        return on_gpu, np.maximum(on_gpu, anywhere)

    def _scattered(self, slots: Numbers, num_slots: int) -> NDArray[np.float64]:
        depths = np.zeros(num_slots + 1)
        held = self._holders.depths[: len(slots)]
        berths = np.flatnonzero(held)
        depths[slots[berths]] = held[berths] * self._stride_blocks
        return depths[:num_slots]

    def deepest(self, most: int, salt: int, among: Container[WorkerId] | None = None) -> list[WorkerId]:
        """Return up to `most` workers that hold most of the chain, of those `among` if it is given. The `salt` chooses
        among equal ones."""
        held = self._holders.depths
        berths = np.flatnonzero(held)
        ties = (berths * 2_654_435_761 + salt) % 65_536 / 65_536
        # A worker stands under two berths, and some berths belong to incarnations that are gone.
        order = np.argsort(-(held[berths] + ties))
        found: dict[WorkerId, None] = {}
        for berth in berths[order if among is not None else order[: 4 * most]].tolist():
            owner = self.roster.on_gpu.get(berth) or self.roster.anywhere.get(berth)
            if owner is None or self._incarnations.get(owner[0]) != owner[1]:
                continue
            if among is None or owner[0] in among:
                found[owner[0]] = None
                if len(found) == most:
                    break
        return list(found)

    def __getitem__(self, worker_id: WorkerId) -> CachedDepth:
        on_gpu, anywhere = self._holders.depth_of((worker_id, self._incarnations[worker_id]))
        if not anywhere:
            raise KeyError(worker_id)
        stride_blocks = self._stride_blocks
        return CachedDepth(blocks=on_gpu * stride_blocks, host_blocks=(anywhere - on_gpu) * stride_blocks)

    def __iter__(self) -> Iterator[WorkerId]:
        for worker_id, incarnation in self._holders.owners():
            if self._incarnations.get(worker_id) == incarnation:
                yield worker_id

    def __len__(self) -> int:
        return sum(1 for _ in self)


def deepest(
    depths: Mapping[WorkerId, CachedDepth], most: int, salt: int, among: Container[WorkerId] | None = None
) -> list[WorkerId]:
    """Return up to `most` workers that have most of a prompt cached, wherever, of those `among` if it is given. The
    `salt` chooses among equal ones."""
    if isinstance(depths, BerthDepths):
        return depths.deepest(most, salt, among)
    allowed = depths if among is None else [worker_id for worker_id in depths if worker_id in among]
    order = sorted(allowed, key=lambda worker_id: crc32(worker_id.encode(), salt))
    return nlargest(
        most, order, key=lambda worker_id: depths[worker_id].blocks + depths[worker_id].host_blocks
    )


def usable_cached_tokens(depth_blocks: int, prompt_tokens: int, block_size: int) -> int:
    """Return the prompt tokens that a cached prefix of `depth_blocks` saves.

    The block of the last prompt token is never reused: the token is computed for its logits.
    """
    return min(depth_blocks * block_size, (prompt_tokens - 1) // block_size * block_size)
