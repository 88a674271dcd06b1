"""Incarnations of workers for the property test: what each holds, has published, and may expect of the index."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blockyard.proto.index.contract import Batch, Berth

from .truth import Path, Tiers, name_of


@dataclass(slots=True, kw_only=True)
class WorkerIncarnation:
    """One incarnation, its true caches, and what the index should believe of them."""

    worker_id: str
    incarnation: str
    berth: Berth
    tiers: Tiers
    stride_blocks: int
    published: set[Path] = field(default_factory=set)
    published_anywhere: set[Path] = field(default_factory=set)
    last_batch: Batch = field(default_factory=lambda: Batch(sequence=0))
    deadline: float = 0.0
    is_running: bool = True
    is_refused: bool = False
    """Superseded, retired, flushed or purged: every later write must come back UNKNOWN."""

    def next_batch(self) -> Batch:
        """Return the batch that leads from the published state to the true one."""
        removed, added = _difference(self.published, set(self.tiers.on_gpu.paths), self.stride_blocks)
        anywhere_removed, anywhere_added = _difference(
            self.published_anywhere, set(self.tiers.anywhere.paths), self.stride_blocks
        )
        return Batch(
            sequence=self.last_batch.sequence + 1,
            removed=removed,
            added=added,
            anywhere_removed=anywhere_removed,
            anywhere_added=anywhere_added,
        )

    def applied(self, batch: Batch) -> None:
        self.last_batch = batch
        self.published, self.published_anywhere = (
            set(self.tiers.on_gpu.paths),
            set(self.tiers.anywhere.paths),
        )

    def forgotten(self) -> None:
        self.published, self.published_anywhere = set(), set()

    def refused(self) -> None:
        self.is_refused = True
        self.forgotten()


def _difference(
    before: set[Path], truth: set[Path], stride_blocks: int
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    removed = sorted(known_to_index(before - truth, stride_blocks), key=len, reverse=True)
    added = sorted(known_to_index(truth - before, stride_blocks), key=len)
    return tuple(map(name_of, removed)), tuple(map(name_of, added))


def known_to_index(paths: Iterable[Path], stride_blocks: int) -> set[Path]:
    """Return the paths that an index of this stride knows."""
    return {path for path in paths if len(path) % stride_blocks == 0}


def rounded_down(depths: Mapping[tuple[str, str], int], stride_blocks: int) -> dict[tuple[str, str], int]:
    rounded = {owner: depth - depth % stride_blocks for owner, depth in depths.items()}
    return {owner: depth for owner, depth in rounded.items() if depth}
