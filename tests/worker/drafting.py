"""Drafters and a speculation that tests force: right and wrong guesses in any mixture, whatever they cost."""

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.speculation.drafter import Drafter
from blockyard.worker.speculation.speculation import MAX_DRAFTS, Speculation

Output = tuple[tuple[int, ...], int]
"""A prompt, and the index of one of its outputs."""


class ForcedDrafter:
    """Drafts the tokens that an output is known to get, each with a given probability, and other tokens instead."""

    def __init__(
        self, known: Mapping[Output, Items[int]], *, share_right: float, seed: int = 0, vocab_size: int = 270
    ) -> None:
        self._known = known
        self._share_right = share_right
        self._chance = random.Random(seed)
        self._vocab_size = vocab_size

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        output = self._known.get((tuple(sequence.tokens[: sequence.prompt_length]), sequence.index), ())
        following = [*output[sequence.num_generated :][:most]]
        following += [0] * (most - len(following))
        return [self._maybe(token) for token in following], 8

    def _maybe(self, token: int) -> int:
        if self._chance.random() < self._share_right:
            return token
        return (token + self._chance.randrange(1, self._vocab_size)) % self._vocab_size

    def forget(self, ended: Iterable[SequenceId]) -> None:
        pass


class AlwaysDrafts(Speculation):
    """Verifies drafts in every step, of any number up to the most that is possible."""

    def __init__(self, drafter: Drafter, seed: int = 0) -> None:
        super().__init__(drafter)
        self._forced = drafter
        self._chance = random.Random(seed)

    def may_draft(self, num_rows: int) -> bool:
        return True

    def propose(
        self, candidates: Items[tuple[Sequence, int]], *, num_rows: int, most: int
    ) -> list[tuple[Sequence, list[int]]]:
        chosen = []
        if self._chance.random() < 0.2:
            return []
        for sequence, useful in candidates:
            count = min(useful, most, self._chance.randint(0, MAX_DRAFTS))
            if count > 0:
                tokens, _ = self._forced.draft(sequence, count)
                most -= len(tokens)
                chosen.append((sequence, tokens))
        return chosen

    def is_worth_waiting(self, candidates: Items[tuple[Sequence, int]], *, num_rows: int, most: int) -> bool:
        return self._chance.random() < 0.7
