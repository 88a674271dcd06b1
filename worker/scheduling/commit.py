"""Commit: applies a step's tokens to its sequences. They grow, fork, advance their beam search, or end.

Owns the commit of one step's rows, and takes back rows whose results do not count. Does not own the queues (queues.py),
the blocks (cache/block_tables.py) or the beam search (sequences/beams.py).
"""

from collections.abc import Collection, Set
from dataclasses import dataclass
from typing import NamedTuple

from blockyard.worker.cache.block_tables import BlockTables
from blockyard.worker.scheduling.queues import Queues
from blockyard.worker.sequences.beams import BeamGroup, Hypothesis, NextBeam
from blockyard.worker.sequences.identifiers import HostSlot, SequenceId
from blockyard.worker.sequences.sequence import FinishReason, Sequence, SequenceState, TokenLogprob
from blockyard.worker.sequences.step_plan import (
    FAILED_TOKEN,
    NO_CHOICE,
    NO_TOKEN,
    RowExtras,
    ScheduledRow,
    StepPlan,
)


class SequenceUpdate(NamedTuple):
    """One sequence's result of a step: a token, an end, or both. A tuple, because each step makes one for each
    sequence."""

    sequence: Sequence
    token: int | None
    """None: the sequence has failed, or has an embedding."""
    logprobs: tuple[TokenLogprob, ...] = ()
    has_no_choice: bool = False
    """Whether the sequence failed because the request's own limits forbid every token."""
    embedding: bytes = b""
    """The prompt's embedding, which ends the sequence."""
    drafted: tuple[int, ...] = ()
    """Tokens after `token`, which drafts gave in the same step."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.drafted if self.token is None else (self.token, *self.drafted)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamsUpdate:
    """Result of a beam search that has ended."""

    sequence: Sequence
    """One of the search's last beams."""
    hypotheses: tuple[Hypothesis, ...]
    """The best `n` finished beams, the best first."""


Update = SequenceUpdate | BeamsUpdate


class StepCommit:
    """Applies the results of rows to the sequences of one scheduler."""

    def __init__(self, queues: Queues, tables: BlockTables, *, max_model_len: int) -> None:
        self._queues = queues
        self._tables = tables
        self._max_model_len = max_model_len

    def commit(self, row: ScheduledRow, token: int, extras: RowExtras) -> list[Update]:
        """Apply a row's token and extras to its sequence, and return the updates.

        A sequence that has ended meanwhile takes no token. Its blocks go back once no step in flight computes it.
        """
        sequence = row.sequence
        sequence.num_in_flight -= 1
        sequence.num_computed = row.end
        if sequence.is_over:
            if token >= NO_TOKEN and sequence.state is not SequenceState.FAILED:
                self._tables.confirm(sequence, row.start)
            self._queues.release_if_idle(sequence)
            return []
        if token in (FAILED_TOKEN, NO_CHOICE):
            self._queues.leave(sequence, SequenceState.FAILED)
            return [SequenceUpdate(sequence=sequence, token=None, has_no_choice=token == NO_CHOICE)]
        if extras.prompt_logprobs and row.start <= len(sequence.prompt_logprobs):
            known = len(sequence.prompt_logprobs) - row.start
            sequence.prompt_logprobs += extras.prompt_logprobs[known:]
        self._tables.confirm(sequence, row.start)
        if sequence.group is None and row.samples and sequence.num_outputs == 1:
            return [self._take_token(sequence, token, extras.logprobs)]
        if extras.embedding:
            sequence.finish_reason = FinishReason.STOP
            self._queues.leave(sequence, SequenceState.FINISHED)
            return [SequenceUpdate(sequence, None, embedding=extras.embedding)]
        if not row.samples:
            return []
        if sequence.group is not None:
            return self._commit_beam(sequence, sequence.group, extras)
        return self._commit_forks(sequence, (token, *extras.tokens), extras.logprobs)

    def commit_draft(self, row: ScheduledRow, token: int, extras: RowExtras) -> SequenceUpdate | None:
        """Apply the token after a draft if all drafts up to it are right, and return the update.

        The rows of a sequence's drafts are committed in order, after its other row. A draft whose row has failed counts
        as wrong: the next step computes its position again.
        """
        sequence = row.sequence
        sequence.num_in_flight -= 1
        if sequence.is_over:
            self._queues.release_if_idle(sequence)
            return None
        update = None
        if token >= 0 and len(sequence.tokens) == row.end and sequence.tokens[-1] == row.drafts[-1]:
            sequence.num_scheduled = sequence.num_computed = row.end
            sequence.num_drafted -= 1
            self._tables.name_full_blocks(sequence)
            self._tables.confirm(sequence, row.start)
            update = self._take_token(sequence, token, extras.logprobs)
        if not sequence.num_in_flight and not sequence.is_over:
            self._tables.end_drafts(sequence)
        return update

    def _take_token(
        self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprob, ...]
    ) -> SequenceUpdate:
        sequence.tokens.append(token)
        self._tables.name_full_blocks(sequence)
        sequence.finish_reason = self._finish_reason(sequence, token)
        if sequence.finish_reason is not None:
            self._queues.leave(sequence, SequenceState.FINISHED)
        return SequenceUpdate(sequence, token, logprobs)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        stops = token in sampling.stop_token_ids or token in sampling.eos_token_ids
        if stops and sequence.num_generated >= sampling.min_tokens:
            sequence.stop_token = token
            return FinishReason.STOP
        full = len(sequence.tokens) >= self._max_model_len
        if full or sequence.num_generated >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _commit_forks(
        self, sequence: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> list[Update]:
        """Fork a sequence into one for each of `tokens`, the first tokens of its outputs, and give each its token."""
        assert len(tokens) == sequence.num_outputs
        sequence.num_outputs = 1
        outputs = [sequence, *(self._queues.fork(sequence, index) for index in range(1, len(tokens)))]
        return [
            self._take_token(output, token, logprobs[index : index + 1])
            for index, (output, token) in enumerate(zip(outputs, tokens, strict=True))
        ]

    def _commit_beam(self, beam: Sequence, group: BeamGroup, extras: RowExtras) -> list[Update]:
        if not group.offer(beam, extras.candidates):
            return []
        following = group.advance()
        if not following:
            for live in group.live:
                self._queues.leave(live, SequenceState.FINISHED)
            return [BeamsUpdate(sequence=beam, hypotheses=tuple(group.best()))]
        self._go_on(group, following)
        return []

    def _go_on(self, group: BeamGroup, following: list[NextBeam]) -> None:
        """Continue a search with the `following` beams, and end those of its beams that have no child.

        A parent becomes its own first child. The other children are forked from it before any token is added.
        """
        parents: set[SequenceId] = set()
        beams: list[Sequence] = []
        for chosen in following:
            parent = chosen.parent
            is_first = parent.sequence_id not in parents
            parents.add(parent.sequence_id)
            beams.append(parent if is_first else self._queues.fork(parent, parent.index))
        for dropped in group.live:
            if dropped.sequence_id not in parents:
                self._queues.leave(dropped, SequenceState.CANCELLED)
        for chosen, beam in zip(following, beams, strict=True):
            beam.tokens.append(chosen.token)
            self._tables.name_full_blocks(beam)
        group.go_on(
            [(beam, chosen.cumulative_logprob) for chosen, beam in zip(following, beams, strict=True)]
        )

    def fail(self, row: ScheduledRow) -> list[Update]:
        """End the sequence of a row after its step raised. No block that the step computed is published."""
        row.sequence.num_in_flight -= 1
        if row.sequence.is_over:
            self._queues.release_if_idle(row.sequence)
            return []
        self._queues.leave(row.sequence, SequenceState.FAILED)
        return [SequenceUpdate(sequence=row.sequence, token=None)]

    def lose(self, slots: Set[HostSlot], rows: Collection[ScheduledRow]) -> None:
        """Drop what these slots of host memory held, and make the sequences of `rows`, which needed it, wait again."""
        if self._tables.host_cache is not None:
            self._tables.host_cache.drop(slots)
        for row in rows:
            if not row.sequence.num_generated and not row.sequence.num_preemptions:
                row.sequence.cached_tokens = None  # counted again at its next admission
        self.take_back(rows)

    def take_back(self, rows: Collection[ScheduledRow]) -> None:
        """Release the sequences of rows whose results do not count, and queue them again. With a beam goes its
        search."""
        for row in rows:
            row.sequence.num_in_flight -= 1
            if row.sequence.is_over:
                self._queues.release_if_idle(row.sequence)
        for row in rows:
            group = row.sequence.group
            for sequence in (row.sequence,) if group is None else tuple(group.live):
                if sequence.state is SequenceState.RUNNING:
                    self._tables.release(sequence)
                    self._queues.wait_again(sequence)

    def distrust_host_memory(self, plan: StepPlan) -> None:
        """Drop all blocks in host memory after a step that failed, if it moved any."""
        if plan.to_host or plan.from_host:
            for waiting in self._queues.waiting:
                self._tables.forget_swapped(waiting)
            if self._tables.host_cache is not None:
                self._tables.host_cache.clear()
