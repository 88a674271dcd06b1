"""Pauses: unused blocks that a client expects to need again at a known time, by that time.

A request may say after how many seconds its session comes back. Until then its blocks do not age. They wait in buckets
of BUCKET_SECONDS. Those that only this session has built on are *due* in a bucket: the farther away that is, the sooner
they are evicted. Blocks that other chains build on too are *shared*: they may be needed at any time until then.

Once the time has passed, a block is like one that was just used. So a wrong hint keeps a block at most for its pause
longer. Does not own the choice among buckets and other blocks (block_pool.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from math import ceil
from typing import Generic, TypeVar

BUCKET_SECONDS = 2.0
NOT_PAUSED = 0
"""The bucket of a block that nothing is expected to need."""

Key = TypeVar("Key", bound=Hashable)
Queue = OrderedDict[Key, None]


def bucket_of(due_seconds: float) -> int:
    """Return the bucket of a time on the pool's clock. Never NOT_PAUSED."""
    return max(1, ceil(due_seconds / BUCKET_SECONDS))


class Pauses(Generic[Key]):
    """Paused things of one account. In a queue, the first is evicted first."""

    __slots__ = ("_due", "_shared", "num")

    def __init__(self, num_kinds: int) -> None:
        self.num = 0
        self._due: tuple[dict[int, Queue[Key]], ...] = tuple({} for _ in range(num_kinds))
        """Queues by kind and bucket."""
        self._shared: dict[int, Queue[Key]] = {}

    def _queues(self, kind: int, is_shared: bool) -> dict[int, Queue[Key]]:
        return self._shared if is_shared else self._due[kind]

    def add(self, key: Key, bucket: int, kind: int, *, is_shared: bool) -> None:
        self._queues(kind, is_shared).setdefault(bucket, OrderedDict())[key] = None
        self.num += 1

    def remove(self, key: Key, bucket: int, kind: int, *, is_shared: bool) -> None:
        del self._queues(kind, is_shared)[bucket][key]
        self.num -= 1

    def has(self, key: Key, bucket: int, kind: int, *, is_shared: bool) -> bool:
        return key in self._queues(kind, is_shared).get(bucket, ())

    def pop_passed(self, now_seconds: float) -> Iterator[Key]:
        """Take out what is due by now, in order of time, and yield it. A child comes before its parent."""
        sources = (*self._due, self._shared)
        passed = {bucket for queues in sources for bucket in queues if bucket * BUCKET_SECONDS <= now_seconds}
        for bucket in sorted(passed):
            for queues in sources:
                queue = queues.pop(bucket, None)
                if queue is not None:
                    self.num -= len(queue)
                    yield from queue
                    queue.clear()

    def farthest(self) -> Iterator[tuple[int, Queue[Key]]]:
        """Yield, for each kind in order, the last bucket in which anything is due, and its queue."""
        for queues in self._due:
            found = _of(queues, max)
            if found is not None:
                yield found

    def first_shared(self) -> tuple[int, Queue[Key]] | None:
        """Return the first bucket until which anything shared may be needed, and its queue."""
        return _of(self._shared, min)


def _of(
    queues: dict[int, Queue[Key]], choose: Callable[[Iterable[int]], int]
) -> tuple[int, Queue[Key]] | None:
    while queues:
        bucket = choose(queues)
        if queues[bucket]:
            return bucket, queues[bucket]
        del queues[bucket]
    return None
