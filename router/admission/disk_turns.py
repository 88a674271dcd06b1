"""Disk turns: threads for the work on disk that clients' calls cause, shared so that no client holds them all.

A client's work runs one piece at a time, in order. So a client holds one thread at most, however many calls it makes
and however slow the disk is. Does not own what is read or written.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import ParamSpec, TypeVar

from blockyard.router.errors import Overloaded

NUM_THREADS = 8
"""Few, because each one that computes delays the event loop by some milliseconds."""
MAX_CALLS = 16
"""Calls of one client at once that read or write files."""
RETRY_SECONDS = 1.0
P = ParamSpec("P")
T = TypeVar("T")


class DiskTurns:
    """Threads of one user of the disk. `submit` is thread-safe."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="disk")
        self._lock = Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """Work that waits, by client. A client has a queue while its work runs, even if nothing waits."""
        self._calls: Counter[str] = Counter()

    @contextmanager
    def call(self, client: str) -> Iterator[None]:
        """Count a call of a client for the life of the context. Raises Overloaded beyond MAX_CALLS."""
        if self._calls[client] >= MAX_CALLS:
            raise Overloaded(
                f"this client has {MAX_CALLS} calls of files or batches running: come back in {RETRY_SECONDS:g} s",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._calls[client] += 1
        try:
            yield
        finally:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client]

    def submit(self, client: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run work after all earlier work of the client. Cancelling the future drops work that has not begun."""
        future: Future[T] = Future()
        piece = partial(_run, future, partial(work, *args, **kwargs))
        with self._lock:
            if (waiting := self._waiting.get(client)) is not None:
                waiting.append(piece)
                return future
            self._waiting[client] = deque()
        self._begin(client, piece)
        return future

    def _begin(self, client: str, piece: Callable[[], None]) -> None:
        def run() -> None:
            piece()
            with self._lock:
                waiting = self._waiting[client]
                if not waiting:
                    del self._waiting[client]
                    return
                following = waiting.popleft()
            # Behind the work of other clients that wait for a thread.
            self._begin(client, following)

        with suppress(RuntimeError):  # the interpreter ends
            self._threads.submit(run)


def _run(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
