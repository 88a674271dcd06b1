"""Draft model: a smaller model of the same vocabulary that guesses next tokens, with a KV pool of its own.

Its pool has a block for each block of the served model's pool, and uses the same block tables. So it decides nothing
about blocks, and sequences that share a prefix share its keys there too. It computes only sequences that are to have
drafts, when they are. Therefore blocks may lack its keys: prompts, blocks found in the prefix cache, fetched or swapped
in. Each block that it has written keeps a note of what it holds, and what is missing is computed first (catching up).

    draft pool   [ same blocks as the served model's pool ........ | a spare block for each sequence of a call ]

Drafts that do not fit a sequence's last block lie in a spare block, and are forgotten after the call.

Wrong or missing keys only make wrong drafts, since every draft is verified. A model that raises makes no draft.

It draws with the request's own parameters and random numbers (sampling/draw.py), but without its grammar. Where both
models have the same logits, they draw the same tokens.
"""

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import NamedTuple

from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId, BlockName, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import (
    FAILED_TOKEN,
    ScheduledRow,
    StepPlan,
    StepTokens,
    decodes_first,
)
from blockyard.worker.speculation.row_times import RowTimes

logger = logging.getLogger(__name__)

UNGUESSED = -1
"""Stands for a draft that the model is still to make."""
SHORT_LAG_TOKENS = 32
"""Tokens without keys that are computed together with the newest one. More of them are caught up by themselves."""
CATCH_UP_SHARE = 0.005
"""Share of the time that may be spent on catching up, whatever that brings."""
GAIN_SHARE = 0.5
"""Share of the time that drafts have saved which may be spent on catching up too."""
MAX_ALLOWANCE_SECONDS = 2.0
"""Most time for catching up that is saved up without a gain. An engine starts with it."""
MAX_EARNED_SECONDS = 10.0
"""Most time for catching up that is saved up of gains."""
MAX_CATCH_UP_SECONDS = 0.25
"""Most time of one call for catching up, because all requests wait for it."""
FIRST_CATCH_UP_TOKENS = 64
"""Tokens of a call before the time of one was measured, and the least later."""
MAX_FAILURES = 3
"""Failed calls after which the model is not used any more."""

Parent = BlockName | tuple[SequenceId, int]
"""Identity of all tokens before a block: the name of the block before it, or where that has none, the sequence and the
block's place in it."""


class _Held(NamedTuple):
    """Note of a block of the draft pool: it holds the keys of `tokens`, behind all that `parent` stands for."""

    parent: Parent
    tokens: Items[int]


@dataclass(slots=True, kw_only=True)
class _Shadow:
    """A sequence in one call: the draft model's own copy, which grows by each draft."""

    sequence: Sequence
    copy: Sequence
    num_computed: int
    """Leading positions whose keys the draft pool has."""
    num_drafts: int
    """Drafts that are wanted."""

    @property
    def num_missing(self) -> int:
        """Known tokens and drafts that are not computed."""
        return len(self.copy.tokens) - self.num_computed

    @property
    def drafts(self) -> list[int]:
        return self.copy.tokens[len(self.sequence.tokens) :].tolist()

    @property
    def has_all(self) -> bool:
        return len(self.copy.tokens) - len(self.sequence.tokens) >= self.num_drafts


class DraftModel:
    """Guesses tokens of one engine's sequences. Not thread-safe."""

    def __init__(
        self,
        execute: Callable[[StepPlan], StepTokens],
        *,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`execute` runs a step of the model (`Runner.execute`). Its pool has `num_blocks` blocks, as many as the
        served model's, and behind them a spare one for each sequence of a call.

        `max_tokens` is the longest sequence of the model, and `max_step_tokens` the most tokens of a step.
        """
        self._execute = execute
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self.num_failures = 0
        """Calls that have failed since the start."""
        self._held: dict[BlockId, _Held] = {}
        self._full: dict[SequenceId, tuple[object, int]] = {}
        """Leading blocks whose keys are known to be there, under a version of the block table."""
        self._times = RowTimes()
        self._allowance_seconds = MAX_ALLOWANCE_SECONDS
        self._seconds_a_token = 0.0
        """Time of catching up a token, when that was done last. 0.0 before."""
        self._last_look = clock()
        self._spent_seconds = self._catch_up_seconds = 0.0

    def measure(self, most_sequences: int) -> None:
        """Measure passes of several numbers of sequences up to the given one, so that the first choice counts their
        time. Call it once, when the model is warm."""
        numbers, number = list[int](), most_sequences
        while number:
            numbers.append(number)
            number //= 4
        for number in reversed(numbers):
            scratch = [_scratch_sequence(place) for place in range(number)]
            # The first pass of a number is not counted.
            self._guess([(sequence, 3) for sequence in scratch])
            self.forget(sequence.sequence_id for sequence in scratch)

    def earn(self, seconds: float) -> None:
        """Note the time that drafts of this model have saved. A share of it may be spent on catching up."""
        self._save_up(GAIN_SHARE * seconds, MAX_EARNED_SECONDS)

    def _save_up(self, seconds: float, most: float) -> None:
        self._allowance_seconds = max(self._allowance_seconds, min(self._allowance_seconds + seconds, most))

    def most(self, sequence: Sequence, wanted: int) -> int:
        """Return how many of `wanted` drafts the model can make for a sequence. Nothing is computed."""
        if self.num_failures >= MAX_FAILURES:
            return 0
        now = self._clock()
        self._save_up(CATCH_UP_SHARE * (now - self._last_look), MAX_ALLOWANCE_SECONDS)
        self._last_look = now
        lag = len(sequence.tokens) - self._num_cached(sequence)
        if lag > SHORT_LAG_TOKENS and self._allowance_seconds <= 0:
            return 0
        return max(0, min(wanted, self._max_tokens - len(sequence.tokens)))

    def seconds(self, num_sequences: int, num_drafts: int) -> float:
        """Return the expected seconds of up to `num_drafts` drafts for each of so many sequences, without catching up.
        0.0 before any were measured."""
        return num_drafts * self._times.expected(num_sequences) if num_sequences else 0.0

    def take_seconds(self) -> tuple[float, float]:
        """Return the seconds since the last call of this: those of drafts, and those of catching up."""
        spent, caught_up = self._spent_seconds, self._catch_up_seconds
        self._spent_seconds = self._catch_up_seconds = 0.0
        return spent, caught_up

    def complete(self, chosen: Items[tuple[Sequence, list[int]]]) -> list[tuple[Sequence, list[int]]]:
        """Return drafts of sequences, with those that are UNGUESSED made. A sequence without any is left out.

        All tokens of the sequences are known, and their block tables reach to the last one.
        """
        wanted = [(sequence, len(drafts)) for sequence, drafts in chosen if UNGUESSED in drafts]
        made: dict[SequenceId, list[int]] = {}
        began, caught_up_before = self._clock(), self._catch_up_seconds
        if wanted:
            try:
                made = self._guess(wanted)
            except Exception:
                self.num_failures += 1
                if self.num_failures == 1:
                    logger.exception("the draft model failed: steps go on without its drafts")
                if self.num_failures == MAX_FAILURES:
                    logger.error("the draft model failed %d times: it is not used any more", MAX_FAILURES)
        caught_up = self._catch_up_seconds - caught_up_before
        self._spent_seconds += self._clock() - began - caught_up
        self._allowance_seconds -= caught_up
        completed = [
            (sequence, made.get(sequence.sequence_id, []) if UNGUESSED in drafts else drafts)
            for sequence, drafts in chosen
        ]
        return [(sequence, drafts) for sequence, drafts in completed if drafts]

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Drop sequences that have ended. Their blocks keep the model's keys. Unknown ones are ignored."""
        for sequence_id in ended:
            self._full.pop(sequence_id, None)

    def _guess(self, wanted: Items[tuple[Sequence, int]]) -> dict[SequenceId, list[int]]:
        shadows = [self._shadow(number, *one) for number, one in enumerate(wanted)]
        self._catch_up([shadow for shadow in shadows if shadow.num_missing > SHORT_LAG_TOKENS])
        room, ready = self._max_step_tokens, list[_Shadow]()
        for shadow in shadows:
            if shadow.num_missing <= min(SHORT_LAG_TOKENS, room):
                room -= shadow.num_missing
                ready.append(shadow)
        drafting = ready
        while drafting:
            began = self._clock()
            tokens = self._run(drafting, [shadow.num_missing for shadow in drafting], samples=True)
            self._times.observe(len(drafting), self._clock() - began)
            for shadow, token in zip(drafting, tokens, strict=True):
                if token >= 0:
                    shadow.copy.tokens.append(token)
            drafting = [shadow for shadow in drafting if shadow.num_missing and not shadow.has_all]
        return {shadow.sequence.sequence_id: shadow.drafts for shadow in ready}

    def _shadow(self, number: int, sequence: Sequence, num_drafts: int) -> _Shadow:
        num_blocks = -(-len(sequence.tokens) // self._block_size)
        spare = BlockId(self._num_blocks + number)
        copy = Sequence(
            sequence_id=SequenceId(number),
            tokens=sequence.tokens[:],
            prompt_length=sequence.prompt_length,
            sampling=replace(sequence.sampling, logprobs=None, prompt_logprobs=None),
            names=[],
            index=sequence.index,
            block_table=BlockTable([*sequence.block_table[:num_blocks], spare]),
        )
        # The last token is computed in any case, because the first draft follows from it.
        start = min(self._num_cached(sequence), len(sequence.tokens) - 1)
        return _Shadow(sequence=sequence, copy=copy, num_computed=start, num_drafts=num_drafts)

    def _catch_up(self, shadows: Items[_Shadow]) -> None:
        """Compute what these sequences lack before their last tokens, as much of it as a step and the time allow."""
        room, lagging, counts = FIRST_CATCH_UP_TOKENS, list[_Shadow](), list[int]()
        if self._seconds_a_token:
            seconds = min(self._allowance_seconds, MAX_CATCH_UP_SECONDS)
            room = max(room, int(min(seconds / self._seconds_a_token, self._max_step_tokens)))
        room = min(room, self._max_step_tokens)
        for shadow in shadows:
            if room:
                lagging.append(shadow)
                counts.append(min(shadow.num_missing - 1, room))
                room -= counts[-1]
        if lagging:
            began = self._clock()
            self._run(lagging, counts, samples=False)
            seconds = self._clock() - began
            self._catch_up_seconds += seconds
            self._seconds_a_token = seconds / sum(counts)

    def _run(self, shadows: Items[_Shadow], counts: Items[int], *, samples: bool) -> list[int]:
        """Compute the next positions of sequences, so many of each, and return the token that each one gives."""
        size, rows = self._block_size, list[ScheduledRow]()
        for shadow, count in zip(shadows, counts, strict=True):
            rows.append(ScheduledRow(shadow.copy, shadow.num_computed, count, samples=samples))
            for block in shadow.copy.block_table[shadow.num_computed // size : -(-rows[-1].end // size)]:
                self._held.pop(block, None)
        plan = StepPlan(step=0, rows=decodes_first(rows))
        tokens = self._execute(plan).tokens
        if FAILED_TOKEN in tokens:
            raise ArithmeticError("the draft model's results are not finite")
        token_of = {row.sequence.sequence_id: token for row, token in zip(plan.rows, tokens, strict=True)}
        for shadow, row in zip(shadows, rows, strict=True):
            shadow.num_computed = row.end
            self._note(shadow, row)
        return [token_of[row.sequence.sequence_id] for row in rows]

    def _note(self, shadow: _Shadow, row: ScheduledRow) -> None:
        """Note what the blocks hold into which a row has written."""
        size, table = self._block_size, shadow.copy.block_table
        num_shared = len(table) - 1
        for index in range(row.start // size, min(-(-row.end // size), num_shared)):
            tokens = shadow.copy.tokens[index * size : min((index + 1) * size, row.end)]
            self._held[table[index]] = _Held(_parent(shadow.sequence, index), tokens)

    def _num_cached(self, sequence: Sequence) -> int:
        """Return for how many leading positions the pool has the keys."""
        size, table = self._block_size, sequence.block_table
        version, first = self._full.get(sequence.sequence_id, (None, 0))
        first = first if version is table.version else 0
        num_cached = first * size
        for index in range(first, min(len(table), -(-len(sequence.tokens) // size))):
            held = self._held.get(table[index])
            if held is None or held.parent != _parent(sequence, index):
                break
            num_equal = _num_equal(held.tokens, sequence.tokens[index * size : (index + 1) * size])
            num_cached += num_equal
            if num_equal < size:
                break
        # Under one version the last entry may still be replaced.
        self._full[sequence.sequence_id] = table.version, max(0, min(num_cached // size, len(table) - 1))
        return num_cached


def _scratch_sequence(number: int) -> Sequence:
    """Return a sequence of one token that has no block. Its drafts lie in a spare one."""
    return Sequence(
        sequence_id=SequenceId(-1 - number),
        tokens=token_array([0]),
        prompt_length=1,
        sampling=SamplingParams(),
        names=[],
    )


def _parent(sequence: Sequence, index: int) -> Parent:
    return sequence.names[index] if index < len(sequence.names) else (sequence.sequence_id, index)


def _num_equal(left: Items[int], right: Items[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
