"""What every system under test is: a process that is asked in lines of JSON and answers in lines of JSON.

The first line says what to load, and is answered once it stands; each further line is a list of requests, answered by
when the tokens of each came. Owns the lines, the clock, and the loop that turns an engine step by step. Standard
library only and nothing of Blockyard: peers run it with the Python of their own environment.
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
"""Of each output are kept: enough to see that two systems computed the same."""
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    arrival_seconds: float
    """After the run's start."""
    token_ids: list[int]
    max_tokens: int
    """Exactly so many are made: the end of a text ends nothing here."""


@dataclass(slots=True)
class Course:
    """What became of one request, in seconds after the run's start."""

    submitted: float
    first: float | None = None
    last: float = 0.0
    longest_pause: float = 0.0
    """Between two of its tokens."""
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
    """An engine that is turned from outside."""

    def add(self, number: int, token_ids: list[int], max_tokens: int) -> None: ...

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        """Works for a while, and says which requests got which tokens."""
        ...


def drive(stepper: Stepper, requests: Sequence[Request]) -> list[Course]:
    """Submits each request when it arrives, between two steps, and turns the engine until all are done."""
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
    """A system that stands ready."""

    run: Callable[[Sequence[Request]], list[Course]]
    versions: dict[str, str]
    notes: str = ""
    """What a reader must know to compare it."""


def stepped(stepper: Stepper, versions: dict[str, str], notes: str = "") -> Loaded:
    return Loaded(lambda requests: drive(stepper, requests), versions, notes)


def serve(load: Callable[[Settings], Loaded]) -> None:
    """The process's life. What libraries print goes to stderr, C code's too."""
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
