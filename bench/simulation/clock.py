"""Virtual time: a clock that stands still until an event moves it, and the events in their order."""

import heapq
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

Reply = TypeVar("Reply")


class VirtualClock:
    """Seconds since the start of the simulation; called like `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Events:
    """What is still to happen. Equal times keep the order in which they were asked for."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(seconds, self._clock.now), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self._clock.now + seconds, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            seconds, _, action = heapq.heappop(self._heap)
            self._clock.now = seconds
            action()


def answer(call: Coroutine[Any, Any, Reply]) -> Reply:
    """The result of a coroutine that waits for nothing, such as the index twin's."""
    try:
        call.send(None)
    except StopIteration as done:
        reply: Reply = done.value
        return reply
    call.close()
    raise AssertionError("a call in virtual time must not wait")
