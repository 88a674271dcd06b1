"""Who spent the time: functions of living objects are wrapped, and each gets what it spent without those it called.

The parts add up to the whole. Owns the accounting; which functions count is said by who wraps them.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Label = str | Callable[..., str]
"""Of a part; or what makes one of the call's arguments."""


def _nothing() -> None:
    pass


class Stopwatch:
    """Of one thread. `synchronize` is called at both ends of a part that runs on a device."""

    def __init__(self, synchronize: Callable[[], None] = _nothing) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._synchronize = synchronize
        self._inside: list[float] = []
        """Of each part that is under way: what parts within it have taken."""
        self._in_leaf = False
        self._wrapped: list[tuple[Any, str]] = []

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    @contextmanager
    def part(self, label: str) -> Iterator[None]:
        started = self._begin()
        try:
            yield
        finally:
            self._end(label, started)

    def _begin(self) -> float:
        self._inside.append(0.0)
        return time.perf_counter()

    def _end(self, label: str, started: float) -> None:
        elapsed = time.perf_counter() - started
        self.seconds[label] += elapsed - self._inside.pop()
        self.calls[label] += 1
        if self._inside:
            self._inside[-1] += elapsed

    def wrap(self, owner: Any, name: str, label: Label, *, is_leaf: bool = False) -> None:
        """From now on. What a leaf calls counts as its own, whether it is wrapped or not."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._in_leaf:
                return function(*arguments, **keywords)
            text = label if isinstance(label, str) else label(*arguments, **keywords)
            if is_leaf:
                self._synchronize()
            started = self._begin()
            self._in_leaf = is_leaf
            try:
                result = function(*arguments, **keywords)
                if is_leaf:
                    self._synchronize()
                return result
            finally:
                self._in_leaf = False
                self._end(text, started)

        setattr(owner, name, timed)
        self._wrapped.append((owner, name))

    def unwrap(self) -> None:
        """All that was wrapped is as it was."""
        for owner, name in self._wrapped:
            delattr(owner, name)
        self._wrapped.clear()
