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
        self._recent: dict[bytes, int] = {}
        """Number of the last prompts with each mark, without withdrawn ones. Marks of the latest prompt are last."""

    def add(self, names: Sequence[bytes], prompt_tokens: int) -> tuple[bytes, int]:
        """Count a request until `taken`. Return its marks, and the tokens that it is expected to compute."""
        packed, shared = marks(names, self._block_size), 0
        for number, mark in enumerate(split_marks(packed), start=1):
            num_prompts = self._recent.pop(mark, 0)
            if num_prompts:
                shared = number
            self._recent[mark] = num_prompts + 1
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

    def withdraw(self, packed: bytes) -> bytes:
        """Record that a prompt with these marks has ended before it was computed. Return those that no other prompt
        has."""
        gone = []
        for mark in split_marks(packed):
            num_prompts = self._recent.get(mark, 0)
            if num_prompts > 1:
                self._recent[mark] = num_prompts - 1
            elif num_prompts:
                del self._recent[mark]
                gone.append(mark)
        return b"".join(gone)

    def added_to(self, load: EngineLoad) -> EngineLoad:
        """Return the engine's load with these requests."""
        if not self._requests:
            return load
        return replace(
            load,
            waiting=load.waiting + self._requests,
            queued_prefill_tokens=load.queued_prefill_tokens + self._tokens,
        )
