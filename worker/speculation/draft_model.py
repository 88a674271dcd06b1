"""Draft model: a smaller model that guesses the next tokens of sequences, over a KV pool of its own.

Its pool has a block for each block of the target's pool, with the same number. So a prefix that sequences share is
computed once here too, and no block is ever chosen for eviction. It computes what it lacks when it drafts. Blocks that
were pulled, swapped in or found in the cache have no keys and values here at first.
Each sequence has a shadow: a greedy copy for the runner, whose last tokens are drafts.

Not thread-safe, and used while no step of the target is computed. A step of the draft model runs to its end.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId, BlockName, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan, StepTokens, decodes_first

_GREEDY = SamplingParams(temperature=0.0)


class Executes(Protocol):
    """The part of a runner (execution/runner.py) that drafts need."""

    def execute(self, plan: StepPlan) -> StepTokens: ...


@dataclass(slots=True)
class _Shadow:
    """One sequence as the draft model knows it."""

    sequence: Sequence
    """Known tokens, then drafts. Its blocks are those of the target's sequence, then perhaps a spare one."""
    names: list[BlockName]
    """The list of the target's sequence."""
    version: object
    """Version of the block table from which its blocks were taken."""
    num_blocks: int = 0
    """Blocks that were taken from there."""
    num_known: int = 0
    """Tokens that are not drafts."""
    num_valid: int = 0
    """Leading positions with keys and values of these tokens, drafts included."""
    num_marked: int = 0
    """Leading blocks whose names were noted."""
    drafts: list[int] = field(default_factory=list)


class DraftModel:
    """Implements `Drafter` and `PreparedDrafter` by a runner that computes one model over one pool."""

    def __init__(
        self,
        runner: Executes,
        *,
        block_size: int,
        num_blocks: int,
        num_spare: int,
        vocab_size: int,
        most_positions: int,
        most_tokens: int,
    ) -> None:
        """The runner's pool has `num_blocks` as the target's, and `num_spare` behind them: for the drafts of as many
        sequences. Contexts end at `most_positions`, and a step has up to `most_tokens`."""
        self._runner = runner
        self._block_size = block_size
        self._spare = [BlockId(num_blocks + number) for number in range(num_spare)]
        self._vocab_size = vocab_size
        self._most_positions = most_positions
        self._most_tokens = most_tokens
        self._shadows: dict[SequenceId, _Shadow] = {}
        self._names: dict[BlockId, BlockName] = {}
        """The content of a block of this pool, where all of it is computed and named."""
        self._writers: dict[BlockId, SequenceId] = {}
        """The sequence that wrote last to a block."""
        self._ended: list[SequenceId] = []
        self._num_steps = 0

    def lag(self, sequence: Sequence) -> int | None:
        """Return how many known tokens of a sequence have no keys and values here. At least one: the newest.

        None where the sequence can have no drafts: it is longer than this model's context, or has tokens that this
        model does not know.
        """
        if len(sequence.tokens) + self._block_size > self._most_positions:
            return None
        shadow = self._synchronised(sequence)
        if max(shadow.sequence.tokens[shadow.num_valid :]) >= self._vocab_size:
            return None
        return shadow.num_known - shadow.num_valid

    def catch_up(self, sequences: Iterable[Sequence], most: int) -> None:
        """Compute up to `most` known tokens of these sequences, but for the newest of each. All have a `lag`."""
        rows, left = [], min(most, self._most_tokens)
        for sequence in sequences:
            shadow = self._synchronised(sequence)
            count = min(shadow.num_known - 1 - shadow.num_valid, left)
            if count > 0:
                rows.append(ScheduledRow(shadow.sequence, shadow.num_valid, count, samples=False))
                left -= count
        for row, _ in self._execute(rows):
            self._note(row)

    def draft_all(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        """Return up to so many drafts of each sequence, at most as many as a block has tokens. All have a `lag`.

        A sequence whose results are not finite gets fewer.
        """
        shadows = [self._synchronised(sequence) for sequence, _ in wanted]
        most = {sequence.sequence_id: count for sequence, count in wanted}
        rows = []
        for shadow, spare in zip(shadows, self._spare, strict=False):
            _end_with(shadow, spare)
            start = shadow.num_valid
            rows.append(ScheduledRow(shadow.sequence, start, shadow.num_known - start, samples=True))
        while rows:
            going = []
            for row, token in self._execute(rows):
                shadow = self._note(row)
                if not 0 <= token < self._vocab_size:
                    continue
                shadow.drafts.append(token)
                row.sequence.tokens.append(token)
                if len(shadow.drafts) < most[row.sequence.sequence_id]:
                    going.append(ScheduledRow(row.sequence, row.end, 1, samples=True))
            rows = going
        for shadow in shadows:
            # The spare block is another sequence's the next time.
            shadow.num_valid = min(shadow.num_valid, shadow.num_blocks * self._block_size)
        return [list(shadow.drafts) for shadow in shadows]

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        """Return the drafts of one sequence, and 0: they rest on no match."""
        if self.lag(sequence) is None:
            return [], 0
        return self.draft_all([(sequence, min(most, self._block_size))])[0], 0

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Drop sequences that have ended. Unknown ones are ignored."""
        self._ended += [one for one in ended if self._shadows.pop(one, None) is not None]

    def _execute(self, rows: Items[ScheduledRow]) -> list[tuple[ScheduledRow, int]]:
        """Run rows in as few steps as their tokens fit, and return them with their tokens."""
        found: list[tuple[ScheduledRow, int]] = []
        batch: list[ScheduledRow] = []
        left = self._most_tokens
        for row in decodes_first(rows):
            if batch and row.num_tokens > left:
                found += self._run(batch)
                batch, left = [], self._most_tokens
            batch.append(row)
            left -= row.num_tokens
        return found + self._run(batch) if batch else found

    def _run(self, rows: Items[ScheduledRow]) -> list[tuple[ScheduledRow, int]]:
        ended, self._ended = self._ended, []
        self._num_steps += 1
        plan = StepPlan(step=self._num_steps, rows=tuple(rows), ended=tuple(ended))
        return list(zip(rows, self._runner.execute(plan).tokens, strict=True))

    def _note(self, row: ScheduledRow) -> _Shadow:
        """Note the keys and values that a row has written, and return its sequence's shadow."""
        shadow = self._shadows[row.sequence.sequence_id]
        first, last = row.start // self._block_size, (row.end - 1) // self._block_size
        for block in row.sequence.block_table[first : last + 1]:
            self._names.pop(block, None)
            self._writers[block] = row.sequence.sequence_id
        shadow.num_valid = row.end
        shadow.num_marked = min(shadow.num_marked, first)
        return shadow

    def _mark(self, shadow: _Shadow) -> None:
        """Note the names of the blocks that a sequence has filled with known tokens."""
        most = min(shadow.num_valid // self._block_size, len(shadow.names) - 1)
        for index in range(shadow.num_marked, most):
            block = shadow.sequence.block_table[index]
            if self._writers.get(block) == shadow.sequence.sequence_id:
                self._names[block] = shadow.names[index + 1]
        shadow.num_marked = max(shadow.num_marked, most)

    def _synchronised(self, sequence: Sequence) -> _Shadow:
        """Return a sequence's shadow with its known tokens and blocks, and with what of them is computed."""
        shadow = self._shadows.get(sequence.sequence_id)
        if shadow is None:
            own = Sequence(
                sequence_id=sequence.sequence_id,
                tokens=token_array(),
                prompt_length=1,
                sampling=_GREEDY,
                names=[],
            )
            shadow = self._shadows[sequence.sequence_id] = _Shadow(own, sequence.names, version=None)
        _take_tokens(shadow, sequence)
        self._mark(shadow)
        table = sequence.block_table
        if shadow.version is not table.version:
            shadow.version = table.version
            shadow.sequence.block_table.assign(table)
            shadow.num_marked = self._num_named(sequence)
            shadow.num_valid = shadow.num_marked * self._block_size
        else:
            self._take_blocks(shadow, table)
        shadow.num_blocks = len(table)
        # The newest token is computed again where all are: its output gives the first draft.
        shadow.num_valid = min(shadow.num_valid, shadow.num_known - 1)
        return shadow

    def _take_blocks(self, shadow: _Shadow, table: BlockTable) -> None:
        """Take the blocks that a table got under one version: it grew, or its last block was replaced."""
        own, count = shadow.sequence.block_table, shadow.num_blocks
        if count and own[count - 1] != table[count - 1]:
            own.assign(table)
            shadow.num_valid = min(shadow.num_valid, (count - 1) * self._block_size)
        elif len(table) > count:
            if len(own) > count:
                own.replace(count, table[count])
            own.extend(table[len(own) :])

    def _num_named(self, sequence: Sequence) -> int:
        """Return how many leading blocks of a sequence hold here what their names say."""
        count = 0
        for block, name in zip(sequence.block_table, sequence.names[1:], strict=False):
            if self._names.get(block) != name:
                break
            count += 1
        return count


def _take_tokens(shadow: _Shadow, sequence: Sequence) -> None:
    """Replace drafts by the tokens that are known now. Those that were right keep their keys and values."""
    known, right = shadow.num_known, 0
    for draft, token in zip(shadow.drafts, sequence.tokens[known:], strict=False):
        if draft != token:
            break
        right += 1
    shadow.num_valid = min(shadow.num_valid, known + right)
    del shadow.sequence.tokens[known:]
    shadow.sequence.tokens.extend(sequence.tokens[known:])
    shadow.num_known, shadow.drafts = len(sequence.tokens), []


def _end_with(shadow: _Shadow, spare: BlockId) -> None:
    """Put a spare block behind the blocks of a sequence."""
    own = shadow.sequence.block_table
    if len(own) > shadow.num_blocks:
        own.replace(shadow.num_blocks, spare)
    else:
        own.extend((spare,))
