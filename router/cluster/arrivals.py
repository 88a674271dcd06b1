"""Arrivals: prefixes of prompts that have just reached a worker, from whichever router, as the worker reports them.

The index has a prefix only after the worker has computed and published it. Until then, and some seconds longer in case
the index is late, placement counts it as cached. So several routers send prompts with a common prefix to one worker, as
a single router does by its own bookings (bookings.py). Pure.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from blockyard.proto.naming.marks import MARK_BYTES, marked_depths, split_marks

KEEP_SECONDS = 10.0
"""Time for which an arrival counts: the wait and the prefill of most prompts, and an index that is 5 s late."""
MAX_KEPT_MARKS = 2**18
"""Most marks that a router keeps, about 60 MB. Beyond them the oldest are forgotten before their time."""
WorkerT = TypeVar("WorkerT")


class Arrivals(Generic[WorkerT]):
    """Marks of recent prompts, with the workers that they reached."""

    def __init__(self, clock: Callable[[], float], *, max_marks: int = MAX_KEPT_MARKS) -> None:
        self._clock = clock
        self._max_marks = max_marks
        self._until: dict[bytes, dict[WorkerT, float]] = {}
        """Time at which to forget a mark on a worker."""
        self._in_order = deque[tuple[float, bytes, WorkerT]]()

    def __len__(self) -> int:
        return len(self._in_order)

    def add(self, worker: WorkerT, packed: bytes) -> None:
        """Record the marks of prompts that have reached the worker."""
        until = self._clock() + KEEP_SECONDS
        for mark in split_marks(packed):
            workers = self._until.setdefault(mark, {})
            if workers.get(worker) != until:
                workers[worker] = until
                self._in_order.append((until, mark, worker))
        self._forget_old()

    def withdraw(self, worker: WorkerT, packed: bytes) -> None:
        """Forget the marks of prompts that have ended on the worker before they were computed."""
        for mark in split_marks(packed):
            self._forget(mark, worker)

    def depths(self, names: Sequence[bytes], block_size: int) -> dict[WorkerT, int]:
        """Return the number of leading blocks of a prompt with these names that have reached each worker."""
        self._forget_old()
        found: dict[WorkerT, int] = {}
        for depth in marked_depths(len(names), block_size) if self._until else ():
            for worker in self._until.get(names[depth - 1][:MARK_BYTES], ()):
                found.setdefault(worker, depth)
        return found

    def _forget_old(self) -> None:
        now = self._clock()
        while self._in_order and (self._in_order[0][0] <= now or len(self._in_order) > self._max_marks):
            until, mark, worker = self._in_order.popleft()
            # A later arrival may have renewed the mark, or the worker withdrawn it.
            if self._until.get(mark, {}).get(worker) == until:
                self._forget(mark, worker)

    def _forget(self, mark: bytes, worker: WorkerT) -> None:
        workers = self._until.get(mark, {})
        workers.pop(worker, None)
        if not workers:
            self._until.pop(mark, None)

    def check_invariants(self) -> None:
        kept = {
            (until, mark, worker)
            for mark, workers in self._until.items()
            for worker, until in workers.items()
        }
        assert kept <= set(self._in_order), "an arrival is kept that will not be forgotten"
        assert all(self._until.values()), "a mark is kept without a worker"
        assert len(self._in_order) <= self._max_marks, "more marks are kept than allowed"
