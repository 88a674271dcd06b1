"""Arrivals: requests that have reached this worker and that its engine has not taken, because a step is under way.

Load reports count them, or routers would take the worker for idle until the step ends. Also makes the marks by which
routers learn which prefixes have reached it (proto/naming/marks.py). Pure; one event loop owns it.
"""

from collections.abc import Sequence
from dataclasses import replace

from blockyard.proto.naming.marks import distance_between, marks, split_marks
from blockyard.worker.engine_types import EngineLoad

MAX_REMEMBERED_MARKS = 4096
"""Marks of the last prompts, by which the tokens that a new prompt shares with them are estimated."""


class Arrivals:
    """Requests on their way to the engine, as a number and a sum of tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests = 0
        self._tokens = 0
        self._recent: dict[bytes, None] = {}
        """Marks of the last prompts, the latest last."""

    def add(self, names: Sequence[bytes], prompt_tokens: int) -> tuple[bytes, int]:
        """Count a request until `taken`. Return its marks, and the tokens that it is expected to compute."""
        packed, shared = marks(names, self._block_size), 0
        for number, mark in enumerate(split_marks(packed), start=1):
            if mark in self._recent:
                del self._recent[mark]
                shared = number
            self._recent[mark] = None
        while len(self._recent) > MAX_REMEMBERED_MARKS:
            del self._recent[next(iter(self._recent))]
        shared_tokens = shared * distance_between(len(names), self._block_size) * self._block_size
        tokens = max(prompt_tokens - shared_tokens, 1)
        self._requests += 1
        self._tokens += tokens
        return packed, tokens

    def taken(self, tokens: int) -> None:
        """Record that the engine has taken or refused a request with so many tokens to compute. Its own load counts
        the request now."""
        self._requests -= 1
        self._tokens -= tokens

    def added_to(self, load: EngineLoad) -> EngineLoad:
        """Return the engine's load with these requests."""
        if not self._requests:
            return load
        return replace(
            load,
            waiting=load.waiting + self._requests,
            queued_prefill_tokens=load.queued_prefill_tokens + self._tokens,
        )
