"""Sharded publisher: publishes this worker's blocks to each server of the prefix index, whichever has their prefix.

Owns which of a step's changes go to which server. Each server has a publisher of its own (publisher.py), with its own
berth, lease and resyncs. So the loss of one server delays nothing for the others. Does not own the choice of the server
(proto/index/shards.py) or the one state that operators see (report.py).
"""

import asyncio
from collections.abc import Iterable, Sequence

from blockyard.proto.index.shards import shard_of
from blockyard.worker.cache.prefix_cache import CacheChanges
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.state import PublisherState


class ShardedPublisher:
    """Publishers of one worker, one for each server. With one server it adds nothing to that publisher."""

    def __init__(self, publishers: Sequence[IndexPublisher], *, has_host_cache: bool = False) -> None:
        self._publishers = tuple(publishers)
        self._has_host_cache = has_host_cache
        self._shards: dict[bytes, int] = {}
        """The shard of each published name that is anywhere in this worker, where there are several."""

    def record(self, changes: CacheChanges) -> None:
        """Add a step's changes of the cache to what is to be published. Call it on the event loop."""
        if len(self._publishers) == 1:
            self._publishers[0].record(*changes[:4])
            return
        removed, anywhere_removed = self._split(changes.removed), self._split(changes.anywhere_removed)
        for name in changes.anywhere_removed if self._has_host_cache else changes.removed:
            self._shards.pop(name, None)
        self._learn(changes)
        stored, anywhere_stored = self._split(changes.stored), self._split(changes.anywhere_stored)
        for publisher, *parts in zip(
            self._publishers, stored, removed, anywhere_stored, anywhere_removed, strict=True
        ):
            if any(parts):
                publisher.record(*parts)

    def _learn(self, changes: CacheChanges) -> None:
        roots, num_shards = changes.roots, len(self._publishers)
        by_root = {root: shard_of(root, num_shards) for root in set(roots.values())}
        for names in (changes.stored, changes.anywhere_stored):
            self._shards.update((name, by_root[roots[name]]) for name in names)

    def _split(self, names: Iterable[bytes]) -> list[list[bytes]]:
        """Return the names by shard, in their order."""
        parts: list[list[bytes]] = [[] for _ in self._publishers]
        for name in names:
            if (shard := self._shards.get(name)) is not None:
                parts[shard].append(name)
        return parts

    def withdraw(self) -> None:
        """Make the index hold nothing of this worker, which stays listed there with new, empty berths."""
        for publisher in self._publishers:
            publisher.withdraw()

    def restore(self) -> None:
        """Take `withdraw` back, and republish everything."""
        for publisher in self._publishers:
            publisher.restore()

    def rebuild(self) -> bool:
        """Take new berths and republish everything. Return False for a withdrawn worker, which publishes nothing."""
        are_rebuilt = [publisher.rebuild() for publisher in self._publishers]
        return all(are_rebuilt)

    def states(self) -> list[PublisherState]:
        return [publisher.state() for publisher in self._publishers]

    async def run(self) -> None:
        """Publish until `close` or a cancellation. Raises no error of the index."""
        async with asyncio.TaskGroup() as tasks:
            for publisher in self._publishers:
                tasks.create_task(publisher.run())

    async def close(self) -> None:
        """Stop `run` and retire the berths, so that no router sends requests here. Idempotent."""
        async with asyncio.TaskGroup() as tasks:
            for publisher in self._publishers:
                tasks.create_task(publisher.close())
