"""Planned requests of clients, made of runs of tokens so that equal prefixes are equal tokens.

Owns the types that conversations.py, mooncake.py and plans.py generate. A simulation or a benchmark of a real cluster
sends them. A request may follow another one: it then arrives some time after that one's end, with its output in the
prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Run:
    """Run of `length` tokens that count up from `base`. Equal runs are equal tokens; different bases share nothing."""

    base: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    number: int
    arrival_seconds: float
    """Seconds from the start to the arrival, or, for a request that follows another, from that one's end."""
    prompt: tuple[Run, ...]
    output: Run
    session: str = ""
    follows: int | None = None
    """Number of the request before this one in its conversation. None for the first."""
    expected_pause_seconds: float = 0.0
    """Time until the next request, as the client expects it. 0: the client does not say."""
    adapter: int | None = None
    """Number of the LoRA adapter that it names. None: the bare model."""

    @property
    def prompt_tokens(self) -> int:
        return sum(run.length for run in self.prompt)

    def token_ids(self) -> list[int]:
        return [token for run in self.prompt for token in range(run.base, run.base + run.length)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    about: str
    requests: tuple[PlannedRequest, ...]


class Tokens:
    """Hands out runs that share no token."""

    def __init__(self) -> None:
        self._next = 0

    def run(self, length: int) -> Run:
        run = Run(self._next, length)
        self._next += length
        if self._next > MAX_TOKEN:
            raise ValueError("the workload has more than 2**31 tokens")
        return run


def poisson(rate: float, seconds: float, chance: Random) -> Iterator[float]:
    now = 0.0
    while (now := now + chance.expovariate(rate)) < seconds:
        yield now
