"""Holders of a chain as a look-up in Redis returns them: berths with depths, in arrays, and the roster of all berths.

A thousand workers may hold a chain. Arrays cost the router's event loop microseconds for them, objects milliseconds.
Owns the form of the reply, and refuses what lookup.lua cannot have written. Does not own the sets in Redis (schema.py).
"""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from blockyard.proto.index.contract import (
    MAX_BERTHS,
    Depths,
    Holder,
    Incarnation,
    WorkerId,
    merge_tiers,
)
from blockyard.proto.index.schema import ANYWHERE_SUFFIX
from numpy.typing import NDArray

Owner = tuple[WorkerId, Incarnation]
Numbers = NDArray[np.int64]


class Roster:
    """The incarnation that stands under each berth. It stays the same from one registration to the next."""

    def __init__(self, token: bytes = b"") -> None:
        self.token = token
        """Empty: the roster holds for one reply alone."""
        self.on_gpu: dict[int, Owner] = {}
        """Owners of first numbers."""
        self.anywhere: dict[int, Owner] = {}
        """Owners of second numbers."""
        self.berths: dict[Owner, list[int]] = {}
        """All numbers of an incarnation. It may have earlier ones that are not purged yet."""
        self.size = 1
        """One more than the highest number."""

    @classmethod
    def parse(
        cls, token: bytes, berths: bytes, lengths: bytes, identities: bytes, *, most_bytes: int
    ) -> "Roster":
        """Return the roster. Identities that our scripts cannot have written are left out."""
        roster, begin = cls(token), 0
        for berth, length in zip(_numbers(berths), _numbers(lengths), strict=True):
            text = identities[begin : begin + length].decode(errors="replace")
            begin += length
            if length > most_bytes:
                continue
            parts = text.removesuffix(ANYWHERE_SUFFIX).split("\0", 2)
            if len(parts) == 2 and 0 < berth <= MAX_BERTHS:
                owner = WorkerId(parts[0]), Incarnation(parts[1])
                tier = roster.anywhere if text.endswith(ANYWHERE_SUFFIX) else roster.on_gpu
                tier[berth] = owner
                roster.berths.setdefault(owner, []).append(berth)
                roster.size = max(roster.size, berth + 1)
        return roster


class Holders(Sequence[Holder]):
    """The holders of a chain, of which each Holder is made only when it is asked for."""

    def __init__(self, roster: Roster, depths: Numbers, most: int) -> None:
        self.roster = roster
        self.depths = depths
        """Leading blocks that each berth holds, by its number. 0 for dead berths."""
        self._most = most
        self._listed: list[Holder] | None = None

    @classmethod
    def parse(cls, reply: Sequence[Any], roster: Roster, *, most: int, most_blocks: int) -> "Holders":
        """Return the holders in the first four fields of a reply. Raises ValueError for what our scripts never
        write."""
        blocks, lengths, packed, dead = reply[0], reply[1], reply[2], reply[3]
        depths, begin = np.zeros(roster.size, np.int64), 0
        values = np.frombuffer(packed[: len(packed) // 2 * 2], "<u2")
        for block, length in zip(_numbers(blocks), _numbers(lengths), strict=True):
            if not 0 < block <= most_blocks or not 0 <= length <= len(packed) - begin:
                raise ValueError(block)
            berths = values[begin // 2 : (begin + length) // 2]
            depths[berths[berths < roster.size]] = block
            begin += length // 2 * 2
        depths[[0, *(berth for berth in _numbers(dead) if berth < roster.size)]] = 0
        return cls(roster, depths, most)

    def depth_of(self, owner: Owner) -> tuple[int, int]:
        """Return the leading blocks that an incarnation holds on its GPU, and anywhere."""
        on_gpu = anywhere = 0
        for berth in self.roster.berths.get(owner, ()):
            depth = int(self.depths[berth])
            if berth in self.roster.on_gpu:
                on_gpu = max(on_gpu, depth)
            else:
                anywhere = max(anywhere, depth)
        return on_gpu, max(on_gpu, anywhere)

    def owners(self) -> list[Owner]:
        """Return the incarnations that hold the first block of the chain."""
        return [(holder.worker_id, holder.incarnation) for holder in self._all()]

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, position: int) -> Holder: ...
    @overload
    def __getitem__(self, position: slice) -> list[Holder]: ...
    def __getitem__(self, position: int | slice) -> Holder | list[Holder]:
        return self._all()[position]

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == list(other)

    def _all(self) -> list[Holder]:
        if self._listed is None:
            on_gpu: Depths = {}
            anywhere: Depths = {}
            for berth in np.flatnonzero(self.depths)[: self._most].tolist():
                for owners, tier in ((self.roster.on_gpu, on_gpu), (self.roster.anywhere, anywhere)):
                    if (owner := owners.get(berth)) is not None:
                        tier[owner] = max(tier.get(owner, 0), int(self.depths[berth]))
            self._listed = merge_tiers(on_gpu, anywhere)
        return self._listed


def _numbers(text: bytes) -> list[int]:
    """Return the numbers of a list that a script has joined."""
    numbers = [int(number) for number in text.split(b",")] if text else []
    if any(number < 0 for number in numbers):
        raise ValueError(text[:100])
    return numbers
