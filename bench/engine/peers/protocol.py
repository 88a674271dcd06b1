"""Protocol of every system under test: a process that reads and answers lines of JSON.

The first line has the settings, and its answer comes once the system is loaded. Each further line is a list of
requests, and its answer has the times of their tokens. Owns the lines, the clock, and the loop that drives an engine
step by step. Imports only the standard library: peers run it with the Python of their own environments.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

HEAD_TOKENS = 16
"""Number of first tokens that are kept of each output, to see whether two systems computed the same."""
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    arrival_seconds: float
    """Arrival time after the run's start."""
    token_ids: list[int]
    max_tokens: int
    """Exact number of output tokens: an end-of-text token ends nothing."""


@dataclass(slots=True)
class Course:
    """Times of one request, in seconds after the run's start."""

    submitted: float
    first: float | None = None
    last: float = 0.0
    longest_pause: float = 0.0
    """Longest time between two consecutive arrivals of tokens."""
    num_tokens: int = 0
    head: list[int] = field(default_factory=list)

    def take(self, tokens: Sequence[int], now: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self.longest_pause = max(self.longest_pause, now - self.last)
        self.last = now
        self.num_tokens += len(tokens)
        self.head += tokens[: HEAD_TOKENS - len(self.head)]


class Stepper(Protocol):
    """Engine whose steps the caller runs."""

    def add(self, number: int, token_ids: list[int], max_tokens: int) -> None: ...

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        """Run a step, and return the new tokens of each request."""
        ...


def drive(stepper: Stepper, requests: Sequence[Request]) -> list[Course]:
    """Run the engine until all requests are done, and return their times.

    Each request is submitted at its arrival, between two steps.
    """
    order = deque(sorted(range(len(requests)), key=lambda number: requests[number].arrival_seconds))
    courses: dict[int, Course] = {}
    num_open = 0
    started = time.perf_counter()
    while order or num_open:
        now = time.perf_counter() - started
        while order and requests[order[0]].arrival_seconds <= now:
            request = requests[number := order.popleft()]
            courses[number] = Course(submitted=request.arrival_seconds)
            stepper.add(number, request.token_ids, request.max_tokens)
            num_open += 1
        if not num_open:
            time.sleep(requests[order[0]].arrival_seconds - now)
            continue
        came = list(stepper.step())
        now = time.perf_counter() - started
        for number, tokens in came:
            if tokens:
                courses[number].take(tokens, now)
                num_open -= courses[number].num_tokens >= requests[number].max_tokens
    return [courses[number] for number in range(len(requests))]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded system."""

    run: Callable[[Sequence[Request]], list[Course]]
    versions: dict[str, str]
    notes: str = ""
    """Facts that a reader needs for a fair comparison."""


def stepped(stepper: Stepper, versions: dict[str, str], notes: str = "") -> Loaded:
    return Loaded(lambda requests: drive(stepper, requests), versions, notes)


def serve(load: Callable[[Settings], Loaded]) -> None:
    """Serve the protocol until stdin ends. Output of libraries goes to stderr, also that of C code."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    started = time.perf_counter()
    try:
        loaded = load(json.loads(sys.stdin.readline()))
    except ImportError as missing:
        answer({"absent": f"{missing.name} cannot be imported"})
        return
    answer(
        {
            "versions": loaded.versions,
            "notes": loaded.notes,
            "load_seconds": time.perf_counter() - started,
        }
    )
    for line in sys.stdin:
        requests = [Request(*fields) for fields in json.loads(line)]
        answer({"courses": [asdict(course) for course in loaded.run(requests)]})
