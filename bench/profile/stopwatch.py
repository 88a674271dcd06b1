"""Stopwatch of functions: wraps methods of live objects, and measures each one's time without the functions it calls.

The parts add up to the whole. Owns the accounting. The caller chooses which functions to wrap.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Label = str | Callable[..., str]
"""Label of a part, or a function that makes it from the call's arguments."""


def _nothing() -> None:
    pass


class Stopwatch:
    """Stopwatch of one thread. It calls `synchronize` before and after a part that runs on a device."""

    def __init__(self, synchronize: Callable[[], None] = _nothing) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._synchronize = synchronize
        self._inside: list[float] = []
        """Stack of the running parts: the time that parts within each have taken."""
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
        """Measure a function from now on. Time of functions that a leaf calls counts as its own, even if wrapped."""
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
        """Restore all wrapped functions."""
        for owner, name in self._wrapped:
            delattr(owner, name)
        self._wrapped.clear()
