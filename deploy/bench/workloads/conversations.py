"""Conversations: each turn comes after the answer before it, with everything said so far in its prompt. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from random import Random

from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """How a kind of conversation grows. Ranges of tokens, both ends included."""

    num_systems: int
    system_tokens: int
    num_turns: tuple[int, int]
    first_tokens: tuple[int, int]
    turn_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    pause_seconds: float
    """Between an answer and the next turn, on average."""


def conversations(kind: Conversation, starts: Iterable[float], chance: Random) -> tuple[PlannedRequest, ...]:
    """One for each of `starts`, in seconds."""
    tokens = Tokens()
    systems = [tokens.run(kind.system_tokens) for _ in range(kind.num_systems)]
    numbers, requests = count(), []
    for name, start in enumerate(starts):
        context: tuple[Run, ...] = (chance.choice(systems), tokens.run(chance.randint(*kind.first_tokens)))
        previous: PlannedRequest | None = None
        for _ in range(chance.randint(*kind.num_turns)):
            if previous is not None:
                context = (*previous.prompt, previous.output, tokens.run(chance.randint(*kind.turn_tokens)))
            previous = PlannedRequest(
                number=next(numbers),
                arrival_seconds=start if previous is None else chance.expovariate(1 / kind.pause_seconds),
                prompt=context,
                output=tokens.run(chance.randint(*kind.output_tokens)),
                session=str(name),
                follows=None if previous is None else previous.number,
            )
            requests.append(previous)
    return tuple(requests)
