"""Conversations: each turn follows the answer before it, and its prompt contains all earlier turns. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from random import Random

from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Sizes of a kind of conversation. Ranges include both ends."""

    num_systems: int
    system_tokens: int
    num_turns: tuple[int, int]
    first_tokens: tuple[int, int]
    turn_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    pause_seconds: float
    """Mean time between an answer and the next turn."""


def conversations(kind: Conversation, starts: Iterable[float], chance: Random) -> tuple[PlannedRequest, ...]:
    """Return the requests of one conversation for each of `starts`, which are in seconds."""
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
