"""Steps in virtual time: what speculation costs or saves where a step's true time is a known function of its rows.

The policy sees noisy times, as a real engine does. The result counts true times, so it is exact and needs no tolerance
for noise.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import NO_TOKEN, StepPlan, StepTokens
from blockyard.worker.speculation.draft_model import DraftModel
from blockyard.worker.speculation.speculation import Speculation

from .scheduling import make_sequence

MOST_ROWS = 256
BLOCK_SIZE = 16
MATCH = 8
Right = Callable[[int, int], float]
"""Probability that a draft is right, by the number of the sequence and of the step."""


class Guesses:
    """Guesses that any sequence gets in any step. The clock decides which of them are right."""

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        return [1] * most, MATCH

    def forget(self, ended: Iterable[SequenceId]) -> None:
        pass


class NoGuesses:
    """Leaves all guesses to a draft model."""

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        return [], 0

    def forget(self, ended: Iterable[SequenceId]) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """True seconds of a step: 1, `a_row` for each row, and a jump wherever `tile` more rows begin."""

    a_row: float
    tile: int = 0
    a_tile: float = 0.0
    first: float = 0.0
    """Seconds of first-time work that the first step of each size adds."""
    noise: float = 0.0
    """Standard deviation of a measured time, as a share of it. Disturbances only add time."""
    pauses: float = 0.0
    """Share of the steps whose measured time is three times as long."""
    a_pass: float | None = None
    """Seconds of a pass of a draft model, which then makes all guesses. None: they cost nothing."""
    a_pass_token: float = 0.0
    """Seconds that each token of a pass adds."""

    def true(self, rows: int) -> float:
        return 1.0 + self.a_row * rows + (self.a_tile * ((rows - 1) // self.tile) if self.tile else 0.0)

    def measured(self, rows: int, chance: random.Random) -> float:
        return self.noisy(self.true(rows), chance)

    def noisy(self, true: float, chance: random.Random) -> float:
        seconds = true * (1.0 + abs(chance.gauss(0.0, self.noise)))
        return 3 * seconds if chance.random() < self.pauses else seconds


@dataclass(slots=True)
class Clock:
    """Virtual time of one engine, over all its batches."""

    costs: Costs
    speculation: Speculation | None
    seed: int = 0
    seconds: float = 0.0
    tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    now: float = 0.0
    """Seconds on the draft model's clock. Its times are noisy too."""
    caught_up_seconds: float = 0.0
    """Part of `seconds` in which the draft model computed tokens without guessing."""
    _chance: random.Random = field(init=False)
    _sizes: set[int] = field(default_factory=set)
    _blocks: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    @classmethod
    def of(cls, costs: Costs, seed: int = 0) -> "Clock":
        """Return a clock with speculation, by a draft model where the costs have one. The model is measured."""
        if costs.a_pass is None:
            return cls(costs, Speculation(Guesses()), seed)
        clock = cls(costs, None, seed)
        model = DraftModel(
            clock.execute,
            num_blocks=2**40,
            block_size=BLOCK_SIZE,
            max_tokens=2**40,
            max_step_tokens=2048,
            clock=lambda: clock.now,
        )
        model.measure(MOST_ROWS)
        clock.speculation, clock.seconds = Speculation(NoGuesses(), model), 0.0
        return clock

    def execute(self, plan: StepPlan) -> StepTokens:
        """Run a pass of the draft model."""
        assert self.costs.a_pass is not None
        true = self.costs.a_pass + self.costs.a_pass_token * plan.num_tokens
        self.seconds += true
        self.now += self.costs.noisy(true, self._chance)
        if not any(row.samples for row in plan.rows):
            self.caught_up_seconds += true
        return StepTokens(tokens=[1 if row.samples else NO_TOKEN for row in plan.rows])

    def step(self, sequences: Items[Sequence], right: Right, left: Items[int]) -> list[int]:
        """Run a step, and return the tokens that each sequence gets, of as many as it has `left`."""
        num_rows, got, began = len(sequences), [1] * len(sequences), self.now
        drafted = self._drafts(sequences, left)
        waited = self.now - began
        for place, sequence in enumerate(sequences):
            count = drafted.get(sequence.sequence_id, 0)
            if self.speculation is None or not count:
                continue
            share, num_right = right(int(sequence.sequence_id), self.num_steps), 0
            while num_right < count and self._chance.random() < share:
                num_right += 1
            self.speculation.note(sequence, num_drafted=count, num_right=num_right)
            got[place] += num_right
        num_drafts = sum(drafted.values())
        rows = num_rows + num_drafts
        first = 0.0 if rows in self._sizes else self.costs.first
        self._sizes.add(rows)
        self.seconds += self.costs.true(rows) + first
        if self.speculation is not None:
            measured = self.costs.measured(rows, self._chance) + first
            self.now += measured
            self.speculation.observe(num_rows, num_drafts, measured, waited_seconds=waited)
        if self.costs.a_pass is not None:
            for sequence, count in zip(sequences, got, strict=True):
                self.grow(sequence, count)
        self.tokens += sum(got)
        self.num_steps += 1
        self.num_drafts += num_drafts
        return got

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence more tokens, and the blocks of all that it has."""
        sequence.tokens.extend([2] * num_tokens)
        num_blocks = -(-len(sequence.tokens) // BLOCK_SIZE)
        more = itertools.islice(self._blocks, num_blocks - len(sequence.block_table))
        sequence.block_table.extend(map(BlockId, more))

    def gain(self, batch: int) -> float:
        """Return the rate of tokens over that without speculation, if each step had `batch` decodes."""
        return (self.costs.first + self.costs.true(batch) * self.tokens / batch) / self.seconds

    def _drafts(self, sequences: Items[Sequence], left: Items[int]) -> dict[SequenceId, int]:
        num_rows = len(sequences)
        if self.speculation is None or not self.speculation.may_draft(num_rows):
            return {}
        proposed = self.speculation.propose(
            [(sequence, count - 1) for sequence, count in zip(sequences, left, strict=True)],
            num_rows=num_rows,
            most=MOST_ROWS - num_rows,
        )
        assert sum(len(tokens) for _, tokens in proposed) <= MOST_ROWS - num_rows
        return {sequence.sequence_id: len(tokens) for sequence, tokens in proposed}


def steady(
    costs: Costs, batch: int, right: Right, *, num_steps: int, seed: int = 0, prompt_tokens: int = 0
) -> float:
    """Return the rate of tokens over that without speculation, from the first step on, in a batch that stays full."""
    clock = steady_clock(costs, batch, right, num_steps=num_steps, seed=seed, prompt_tokens=prompt_tokens)
    return clock.gain(batch)


def steady_clock(
    costs: Costs, batch: int, right: Right, *, num_steps: int, seed: int = 0, prompt_tokens: int = 0
) -> Clock:
    """Run a batch that stays full, whose prompts have so many more tokens than three, and return its clock."""
    clock = Clock.of(costs, seed)
    sequences = [make_sequence(number, [1, 2, 3], max_tokens=10**6) for number in range(batch)]
    for sequence in sequences:
        clock.grow(sequence, prompt_tokens)
    for _ in range(num_steps):
        clock.step(sequences, right, [10**6] * batch)
    return clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Ratios to the same batches without speculation."""

    full: float
    """Rate of tokens while all sequences run."""
    request: float
    """Mean time of a request without speculation, over that with it."""
    whole: float
    """Rate of tokens until the last sequence ends."""


def batches(
    costs: Costs,
    batch: int,
    right: Right,
    *,
    num_batches: int,
    uncounted: int = 2,
    num_tokens: int = 128,
    seed: int = 0,
    prompt_tokens: int = 0,
) -> Gains:
    """Return the gains in batches whose outputs all have `num_tokens`. The first, `uncounted` batches teach.

    Sequences whose drafts were right end early, so the last steps of a batch have fewer rows.
    """
    clock = Clock.of(costs, seed)
    assert clock.speculation is not None
    full_seconds, full_tokens, request_seconds, whole_seconds = 0.0, 0, 0.0, 0.0
    for turn in range(uncounted + num_batches):
        sequences = [make_sequence(number, [1, 2, 3], max_tokens=10**6) for number in range(batch)]
        for sequence in sequences:
            clock.grow(sequence, prompt_tokens)
        left = [num_tokens] * batch
        began, had, ends, is_full = clock.seconds, clock.tokens, list[float](), True
        while len(ends) < batch:
            running = [number for number in range(batch) if left[number]]
            got = clock.step([sequences[one] for one in running], right, [left[one] for one in running])
            for number, count in zip(running, got, strict=True):
                left[number] -= count
            ends += [clock.seconds - began] * (len(running) - sum(left[number] > 0 for number in running))
            if is_full and ends:
                is_full = False
                if turn >= uncounted:
                    full_seconds += clock.seconds - began
                    full_tokens += clock.tokens - had
        clock.speculation.forget(sequence.sequence_id for sequence in sequences)
        if turn >= uncounted:
            request_seconds += sum(ends) / batch
            whole_seconds += ends[-1]
    none = num_tokens * costs.true(batch)
    return Gains(
        full=full_tokens / batch * costs.true(batch) / full_seconds,
        request=num_batches * none / request_seconds,
        whole=num_batches * none / whole_seconds,
    )
