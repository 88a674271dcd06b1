"""A machine whose steps take a known time, and mixes of work that it computes."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from blockyard.proto.step_costs import EXCESS_FROM_TOKENS, ROW_SECONDS, StepWork, pairs_of

Prompts = list[tuple[int, int]]
"""Start and length of each chunk."""
Step = tuple[Prompts, list[int]]
"""Chunks of prompts, and the context of each decode."""


def _contexts(chance: Random, most_decodes: int, most_context: int) -> list[int]:
    return [chance.randint(50, most_context) for _ in range(chance.randint(1, most_decodes))]


MIXES: dict[str, Callable[[Random], Step]] = {
    "chat": lambda chance: (
        [(chance.choice((0, 2000, 6000)), chance.randint(200, 3000)) for _ in range(chance.randint(0, 2))],
        _contexts(chance, 60, 8000),
    ),
    "small": lambda chance: (
        [(chance.randint(0, 200), chance.randint(20, 300))] if chance.random() < 0.5 else [],
        _contexts(chance, 20, 500),
    ),
    "long": lambda chance: ([(chance.randrange(0, 60_000, 2000), chance.randint(500, 4000))], []),
    "decode": lambda chance: ([], _contexts(chance, 100, 8000)),
    "trial": lambda chance: ([(0, 256)], []),
}
"""Steps by the kind of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    step_seconds: float = 0.005
    token_seconds: float = 2e-5
    context_share: float = 2e-3
    """Time of a context token that a decode reads, as a part of a prompt token's."""
    pair_share: float = 6e-5
    noise: float = 0.0
    """Standard deviation of a step's time, as a part of it."""

    def step(self, mix: str, chance: Random, *, slowness: float = 1.0) -> StepWork:
        """Compute one step. `slowness` stretches its time."""
        prompts, contexts = MIXES[mix](chance)
        prompt_tokens = sum(length for _, length in prompts)
        num_tokens = prompt_tokens + len(contexts)
        context_tokens = sum(contexts)
        pairs = sum(pairs_of(start, length) for start, length in prompts)
        seconds = self.step_seconds + self.token_seconds * (
            num_tokens + self.context_share * context_tokens + self.pair_share * pairs
        )
        return StepWork(
            seconds=seconds * slowness * max(0.1, chance.gauss(1.0, self.noise)),
            steps=1,
            prompt_steps=int(bool(prompts)),
            prompt_tokens=prompt_tokens,
            excess_tokens=max(0, num_tokens - EXCESS_FROM_TOKENS),
            decodes=len(contexts),
            context_tokens=context_tokens,
            pairs=pairs,
        )

    def row(self, mix: str, chance: Random, *, slowness: float = 1.0) -> StepWork:
        """Compute steps for at least ROW_SECONDS."""
        row = StepWork()
        while row.seconds < ROW_SECONDS:
            row = row.plus(self.step(mix, chance, slowness=slowness))
        return row
