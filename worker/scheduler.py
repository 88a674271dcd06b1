"""What the next step computes: continuous batching under one token budget, with no prefill or decode phase.

`plan()` chooses the rows of a step and takes their blocks; `commit()` takes the tokens that the step sampled. They are
apart, and one step may be in flight while the next is planned:

    plan n | plan n+1 | commit n | plan n+2 | commit n+1 ...

    tokens     [ prompt ................ | generated ........ ]
    computed   [ =================== ]        KV valid below num_computed
    scheduled  [ ========================= ]  planned below num_scheduled, at most two steps ahead

Running sequences come first, decodes before chunks of long prompts, so that no prompt stalls a decode; then the
waiting, first come, first served, each admitted once its whole uncached prompt fits. When blocks run out a running
sequence is preempted: its blocks go back, and it is recomputed later from what is still cached.

Owns the queues and the counters of sequences. No tensors, clocks or I/O.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from blockyard.proto.block_hash import chain
from blockyard.worker.block_pool import BlockPool
from blockyard.worker.prefix_cache import PrefixCache
from blockyard.worker.sequence import (
    BlockId,
    BlockName,
    FinishReason,
    ScheduledRow,
    Sequence,
    SequenceId,
    SequenceState,
    StepPlan,
)

NO_TOKEN = -1
"""What a row that does not sample yields."""
FAILED_TOKEN = -2
"""What a row yields whose logits were not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one engine. Sizes are in tokens unless the name says otherwise."""

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUpdate:
    """What a step brought one sequence: a token, an end, or both."""

    sequence: Sequence
    token: int | None


class CapacityError(ValueError):
    """The request can never fit this engine."""


class Scheduler:
    """Queues over one pool. Not thread-safe: the engine's thread owns it."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, cache: PrefixCache) -> None:
        self.config = config
        self.pool = pool
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._leaving: dict[SequenceId, Sequence] = {}
        self._steps_in_flight = 0
        self._next_step = 0
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} is below max_num_seqs "
                f"{config.max_num_seqs}: some sequences would never decode"
            )
        if pool.num_blocks < self._blocks_for(config.max_model_len):
            raise ValueError(
                f"the KV cache holds {pool.num_blocks * config.block_size} tokens, fewer than max_model_len "
                f"{config.max_model_len}: give it more memory or lower max_model_len"
            )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._leaving)

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens known and not yet scheduled, beyond the one that each decode computes next.

        Of the waiting only what was not cached when they were submitted counts: it is what placement waits for.
        """
        waiting = sum(len(sequence.tokens) - sequence.cached_at_submit for sequence in self.waiting)
        return waiting + sum(max(0, len(s.tokens) - s.num_scheduled - 1) for s in self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises CapacityError where it can never fit."""
        longest = sequence.prompt_length + sequence.sampling.max_tokens
        if longest > self.config.max_model_len:
            raise CapacityError(f"{longest} tokens asked for, {self.config.max_model_len} fit the context")
        if sequence.num_generated >= sequence.sampling.max_tokens:
            raise CapacityError("nothing is left to generate")
        sequence.cached_at_submit = len(self._hits(sequence)) * self.config.block_size
        insort(self.waiting, sequence, key=lambda waiting: waiting.arrival)

    def _hits(self, sequence: Sequence) -> list[BlockId]:
        """Cached blocks of its leading tokens; the last token is always left to compute, for its logits."""
        usable = (len(sequence.tokens) - 1) // self.config.block_size
        return self.cache.match(sequence.names[1 : 1 + usable])

    def cancel(self, sequence: Sequence, state: SequenceState = SequenceState.CANCELLED) -> None:
        """Ends a sequence in any state; its blocks go back at once, or with the step that still computes it."""
        if not sequence.is_over:
            self._leave(sequence, state)

    def plan(self) -> StepPlan:
        """Chooses the next step's rows and takes their blocks. May have no rows."""
        assert self._steps_in_flight < 2, "at most one step may be in flight while another is planned"
        rows: dict[SequenceId, ScheduledRow] = {}
        budget = self.config.max_num_batched_tokens
        for decoding in (True, False):
            for sequence in tuple(self.running):
                todo = self._tokens_to_compute(sequence)
                if todo and (todo == 1) is decoding and sequence.sequence_id not in rows:
                    budget -= self._schedule_running(sequence, min(todo, budget), rows)
        self._admit(budget, rows)
        step, self._next_step = self._next_step, self._next_step + 1
        if rows:
            self._steps_in_flight += 1
        return StepPlan(step=step, rows=tuple(sorted(rows.values(), key=lambda row: row.num_tokens > 1)))

    def _tokens_to_compute(self, sequence: Sequence) -> int:
        if sequence.state is not SequenceState.RUNNING:
            return 0
        in_flight = sequence.num_samples_in_flight
        if sequence.num_generated + in_flight >= sequence.sampling.max_tokens:
            return 0
        return len(sequence.tokens) + in_flight - sequence.num_scheduled

    def _schedule_running(
        self, sequence: Sequence, num_tokens: int, rows: dict[SequenceId, ScheduledRow]
    ) -> int:
        """Schedules `num_tokens` more positions, preempting others if need be. How many it took: all, or 0."""
        if num_tokens < 1:
            return 0
        missing = self._blocks_for(sequence.num_scheduled + num_tokens) - len(sequence.block_table)
        while missing > self.pool.num_allocatable:
            victim = self._choose_victim(rows)
            if victim is None:
                return 0
            self._preempt(victim)
            if victim is sequence:
                return 0
        if missing > 0:
            sequence.block_table.extend(self.pool.allocate(missing))
        self._add_row(sequence, num_tokens, rows)
        return num_tokens

    def _add_row(self, sequence: Sequence, num_tokens: int, rows: dict[SequenceId, ScheduledRow]) -> None:
        start = sequence.num_scheduled
        samples = start + num_tokens >= len(sequence.tokens)
        sequence.num_scheduled += num_tokens
        sequence.num_in_flight += 1
        self._name_blocks(sequence)
        rows[sequence.sequence_id] = ScheduledRow(
            sequence=sequence, start=start, num_tokens=num_tokens, samples=samples
        )

    def _name_blocks(self, sequence: Sequence) -> None:
        """Names the blocks whose last token is scheduled and known."""
        size = self.config.block_size
        full = min(sequence.num_scheduled, len(sequence.tokens)) // size
        if full <= sequence.num_named:
            return
        known = len(sequence.names) - 1
        if full > known:
            tail = sequence.tokens[known * size : full * size]
            sequence.names.extend(BlockName(name) for name in chain(sequence.names[known], tail, size))
        for index in range(sequence.num_named, full):
            self.cache.assign(sequence.block_table[index], sequence.names[index + 1])
        sequence.num_named = full

    def _choose_victim(self, rows: dict[SequenceId, ScheduledRow]) -> Sequence | None:
        """The sequence with the least to recompute for each block that it really frees; ties go to the youngest.

        The oldest is never chosen, so something always gets done; nor is one that this step or a step in flight
        computes, whose blocks could not be had now.
        """
        oldest = min(sequence.arrival for sequence in self.running)
        candidates = [
            (self._recompute_tokens(sequence) / freed, -sequence.arrival, sequence)
            for sequence in self.running
            if sequence.arrival != oldest
            and not sequence.num_in_flight
            and sequence.sequence_id not in rows
            and (freed := self._blocks_freed_by(sequence))
        ]
        return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None

    def _blocks_freed_by(self, sequence: Sequence) -> int:
        return sum(self.pool.references(block) == 1 for block in sequence.block_table)

    def _recompute_tokens(self, sequence: Sequence) -> int:
        """Tokens to compute again: all but the leading blocks that others hold too."""
        shared = 0
        for block in sequence.block_table:
            if self.pool.references(block) == 1:
                break
            shared += 1
        return sequence.num_computed - min(sequence.num_computed, shared * self.config.block_size)

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.num_in_flight
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_scheduled = sequence.num_computed = 0
        sequence.state = SequenceState.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=lambda waiting: waiting.arrival)

    def _admit(self, budget: int, rows: dict[SequenceId, ScheduledRow]) -> None:
        """Admits the waiting in order, while budget, places and blocks last."""
        while budget > 0 and self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            size = self.config.block_size
            hits = self._hits(sequence)
            if not self._fits(sequence, hits):
                return
            self.waiting.pop(0)
            self.running.append(sequence)
            sequence.state = SequenceState.RUNNING
            self.pool.share(hits)
            sequence.block_table = list(hits)
            sequence.num_named = len(hits)
            sequence.num_scheduled = sequence.num_computed = len(hits) * size
            if sequence.cached_tokens is None:
                sequence.cached_tokens = min(len(hits) * size, sequence.prompt_length)
            todo = min(len(sequence.tokens) - sequence.num_scheduled, budget)
            missing = self._blocks_for(sequence.num_scheduled + todo) - len(hits)
            sequence.block_table.extend(self.pool.allocate(missing))
            self._add_row(sequence, todo, rows)
            budget -= todo

    def _fits(self, sequence: Sequence, hits: list[BlockId]) -> bool:
        """Whether all that is uncached fits beside what running prompts still need and a block for each decode.

        A sequence alone always fits: submit and the constructor saw to that.
        """
        if not self.running and not self._leaving:
            return True
        promised = sum(
            max(1, self._blocks_for(len(running.tokens)) - len(running.block_table))
            for running in self.running
        )
        hits_cached = sum(self.pool.references(block) == 0 for block in hits)
        needed = self._blocks_for(len(sequence.tokens)) - len(hits)
        return needed + promised <= self.pool.num_allocatable - hits_cached

    def commit(self, plan: StepPlan, tokens: Iterable[int]) -> list[SequenceUpdate]:
        """Takes a step's tokens, one a row (NO_TOKEN where it sampled none, FAILED_TOKEN where it could not)."""
        if plan.rows:
            self._steps_in_flight -= 1
        updates = []
        for row, token in zip(plan.rows, tokens, strict=True):
            update = self._commit_row(row, token)
            if update is not None:
                updates.append(update)
        return updates

    def _commit_row(self, row: ScheduledRow, token: int) -> SequenceUpdate | None:
        sequence = row.sequence
        sequence.num_in_flight -= 1
        sequence.num_computed = row.end
        if sequence.is_over:
            if token != FAILED_TOKEN:
                self._confirm(sequence)
            self._release_if_idle(sequence)
            return None
        if token == FAILED_TOKEN:
            self._leave(sequence, SequenceState.FAILED)
            return SequenceUpdate(sequence=sequence, token=None)
        if row.samples:
            sequence.tokens.append(token)
        self._name_blocks(sequence)
        self._confirm(sequence)
        if not row.samples:
            return None
        sequence.finish_reason = self._finish_reason(sequence, token)
        if sequence.finish_reason is not None:
            self._leave(sequence, SequenceState.FINISHED)
        return SequenceUpdate(sequence=sequence, token=token)

    def _confirm(self, sequence: Sequence) -> None:
        """Publishes the names of blocks that are computed, root first."""
        table = sequence.block_table
        known = full = min(sequence.num_computed // self.config.block_size, sequence.num_named)
        while known and self.cache.is_unconfirmed(table[known - 1]):
            known -= 1
        for block in table[known:full]:
            self.cache.confirm(block)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        stops = token in sampling.stop_token_ids or token in sampling.eos_token_ids
        if stops and sequence.num_generated >= sampling.min_tokens:
            sequence.stop_token = token
            return FinishReason.STOP
        full = len(sequence.tokens) >= self.config.max_model_len
        if full or sequence.num_generated >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def fail(self, plan: StepPlan) -> list[SequenceUpdate]:
        """Ends every sequence of a step that raised; nothing that it computed is kept or found again."""
        if plan.rows:
            self._steps_in_flight -= 1
        updates = []
        for row in plan.rows:
            row.sequence.num_in_flight -= 1
            if row.sequence.is_over:
                self._release_if_idle(row.sequence)
            else:
                self._leave(row.sequence, SequenceState.FAILED)
                updates.append(SequenceUpdate(sequence=row.sequence, token=None))
        return updates

    def _leave(self, sequence: Sequence, state: SequenceState) -> None:
        (self.waiting if sequence.state is SequenceState.WAITING else self.running).remove(sequence)
        sequence.state = state
        self._leaving[sequence.sequence_id] = sequence
        self._release_if_idle(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        """Blocks of a step in flight return after it: it may still write them."""
        if not sequence.num_in_flight and self._leaving.pop(sequence.sequence_id, None) is not None:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Gives the blocks back. What no step has confirmed is not to be found again, unless another sequence that
        holds it confirms it: so a child's name never outlives its parent's."""
        for block in sequence.block_table:
            if self.pool.references(block) == 1:
                self.cache.retract(block)
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_named = 0

    def check_invariants(self) -> None:
        """Raises AssertionError where tables, counters, names and references disagree. O(blocks)."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        holders = [0] * self.pool.num_blocks
        for sequence in (*self.running, *self._leaving.values()):
            assert len(sequence.block_table) == self._blocks_for(sequence.num_scheduled)
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert sequence.num_computed <= sequence.num_scheduled <= len(sequence.tokens) + 1
            for index, block in enumerate(sequence.block_table):
                holders[block] += 1
                if self.pool.references(block) > 1:
                    assert index < sequence.num_named, "a shared block has a name"
        for sequence in self.waiting:
            assert not sequence.block_table
            assert not sequence.num_in_flight
        for sequence in (*self.running, *self.waiting):
            assert not sequence.is_over
        references = [self.pool.references(block) for block in self.pool.blocks()]
        assert holders == references, "a reference is held by no sequence, or a sequence holds none"
