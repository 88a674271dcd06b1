"""Drafters and a speculation that tests force: right and wrong guesses in any mixture, whatever they cost.

Also a pool of a draft model that knows what each of its slots holds.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items

from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import NO_TOKEN, StepPlan, StepTokens
from blockyard.worker.speculation.draft_model import UNGUESSED, DraftModel
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

    def __init__(
        self, drafter: Drafter | None = None, seed: int = 0, *, model: DraftModel | None = None
    ) -> None:
        """Without a `drafter` the draft `model` makes all drafts."""
        super().__init__(drafter, model)
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
                tokens = self._drafts(sequence, count)
                most -= len(tokens)
                chosen.append((sequence, tokens))
        return chosen if self._model is None else self._model.complete(chosen)

    def _drafts(self, sequence: Sequence, count: int) -> list[int]:
        if self._forced is not None:
            return self._forced.draft(sequence, count)[0]
        assert self._model is not None
        return [UNGUESSED] * self._model.most(sequence, count)

    def is_worth_waiting(self, candidates: Items[tuple[Sequence, int]], *, num_rows: int, most: int) -> bool:
        return self._chance.random() < 0.7


class CheckedKeys:
    """The pool of a draft model, by slot: the tokens up to each position. Checks that no step reads another's keys."""

    def __init__(self, block_size: int, execute: Callable[[StepPlan], StepTokens] | None = None) -> None:
        """Without `execute`, which runs a step, the tokens are made up."""
        self._block_size = block_size
        self._run = execute or _made_up
        self._held: dict[tuple[BlockId, int], int] = {}
        self.num_computed = 0
        """Positions that were computed since the start."""

    def execute(self, plan: StepPlan) -> StepTokens:
        written: dict[tuple[BlockId, int], int] = {}
        for row in plan.rows:
            prefix = 0
            for position in range(row.end):
                prefix = hash((prefix, row.sequence.tokens[position]))
                block, offset = divmod(position, self._block_size)
                slot = row.sequence.block_table[block], offset
                if position < row.start:
                    assert self._held[slot] == prefix, f"position {position} has other keys in {slot}"
                else:
                    assert written.setdefault(slot, prefix) == prefix, "two sequences write one slot"
            self.num_computed += row.num_tokens
        self._held |= written
        return self._run(plan)


def _made_up(plan: StepPlan) -> StepTokens:
    return StepTokens(tokens=[1000 + row.end if row.samples else NO_TOKEN for row in plan.rows])
