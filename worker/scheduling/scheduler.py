"""Scheduler: plans each step by continuous batching under one token budget, with no prefill or decode phase.

`plan()` chooses the rows of a step and takes their blocks. `commit()` takes the tokens that the step sampled. One step
may be in flight while the next is planned:

    plan n | plan n+1 | commit n | plan n+2 | commit n+1 ...

    tokens     [ prompt ................ | generated ........ ]
    computed   [ =================== ]        KV valid below num_computed
    scheduled  [ ========================= ]  planned below num_scheduled, at most two steps ahead

Decodes come first, so that no prompt stalls them. Chunks of running prompts and waiting sequences follow in order of
rank, so that a long prompt does not hold up a more urgent one. A waiting sequence is admitted once the pool has room
for its whole uncached prompt. When blocks run out, a running sequence is preempted (preemption.py). Its blocks are
swapped to host memory, or recomputed later, or its request moves to another worker. After `max_preemptions` preemptions
a sequence is admitted only with room for all that it can ever need, and is never preempted again.

A request with several outputs runs as one sequence until its first token, and then forks. Beams fork and end as their
search decides (sequences/beams.py). Owns the queues and the counters of sequences. Has no tensors, clocks or I/O.
"""

from collections.abc import Callable
from functools import partial

from blockyard.worker.cache.adapter_slots import AdapterSlots
from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.block_tables import BlockTables, Moves
from blockyard.worker.cache.host_memory import HostCache, SwapSpace
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.cache.tier_names import AnywhereNames
from blockyard.worker.scheduling.admission import Admission
from blockyard.worker.scheduling.background import (
    background_room,
    goes_before,
    held_back_of,
    is_background,
)
from blockyard.worker.scheduling.capacity import (
    available_blocks,
    most_blocks,
    seq_slots,
)
from blockyard.worker.scheduling.commit import StepCommit, Update
from blockyard.worker.scheduling.config import CapacityError as CapacityError
from blockyard.worker.scheduling.config import SchedulerConfig as SchedulerConfig
from blockyard.worker.scheduling.drafts import commit_drafts, draft_rows, is_worth_waiting
from blockyard.worker.scheduling.mixed_steps import MixedStepController
from blockyard.worker.scheduling.preemption import Elsewhere, Victim, choose_victim
from blockyard.worker.scheduling.pulls import Pulls
from blockyard.worker.scheduling.queued_work import expected_blocks, queued_prefill, tokens_to_compute
from blockyard.worker.scheduling.queues import Queues
from blockyard.worker.sequences.beams import BeamGroup
from blockyard.worker.sequences.identifiers import RequestId, SequenceId
from blockyard.worker.sequences.sequence import Sequence, SequenceState
from blockyard.worker.sequences.step_plan import (
    LOST_TOKEN,
    RowExtras,
    ScheduledRow,
    StepPlan,
    StepTokens,
    decodes_first,
)
from blockyard.worker.speculation.speculation import Speculation

_NO_EXTRAS = RowExtras()
_make_row = partial(tuple.__new__, ScheduledRow)
"""Make a row from all of its fields. This runs in C alone; a named tuple's own constructor runs Python."""


class Scheduler:
    """Plans and commits the steps of one engine. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, config: SchedulerConfig, *, num_blocks: int, mixed_steps: MixedStepController | None = None
    ) -> None:
        """Without `mixed_steps` the token budget alone limits prompts beside decodes, and no rate is measured."""
        self.config = config
        self.mixed_steps = mixed_steps or MixedStepController(
            max_batched_tokens=config.max_num_batched_tokens
        )
        self.pool = BlockPool(num_blocks)
        anywhere = AnywhereNames() if config.host_cache_blocks else None
        self.cache = PrefixCache(self.pool, anywhere=anywhere)
        self.host_cache = (
            HostCache(config.host_cache_blocks, first_slot=config.swap_blocks, anywhere=anywhere)
            if anywhere is not None
            else None
        )
        self.tables = BlockTables(
            self.pool,
            self.cache,
            config.block_size,
            SwapSpace(config.swap_blocks),
            self.host_cache,
            index_stride_blocks=config.index_stride_blocks,
        )
        self.adapters = AdapterSlots(config.max_loras)
        self.pulls = Pulls(self.tables, index_stride_blocks=config.index_stride_blocks)
        self._queues = Queues(self.tables)
        self._admission = Admission(
            config,
            queues=self._queues,
            tables=self.tables,
            adapters=self.adapters,
            is_held=self._is_held,
            rates=self.mixed_steps.rates,
        )
        self._step_commit = StepCommit(self._queues, self.tables, max_model_len=config.max_model_len)
        self.must_wait_for_mask: Callable[[Sequence], bool] | None = None
        """Returns whether a sequence must wait for its grammar's mask. No step computes the sequence meanwhile, so a
        plan may be empty although there is work."""
        self.speculation: Speculation | None = None
        """None: no token is guessed."""
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_moves = 0
        self.elsewhere: Elsewhere | None = None
        """Another worker with room. None: preempted sequences stay here."""
        self._given_back: list[RequestId] = []
        self._moves: dict[int, Moves] = {}
        """Block moves of the steps in flight, by number of the step."""
        self._next_step = 0
        config.check(num_blocks)

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences in order of rank. `running` is in that order too."""
        return self._queues.waiting

    @property
    def running(self) -> list[Sequence]:
        return self._queues.running

    @property
    def has_work(self) -> bool:
        return bool(self._queues)

    def queued_prefill(self) -> tuple[int, int]:
        """Return how many known tokens are still to be computed, and their pairs (queued_work.py)."""
        return queued_prefill(self.waiting, self.running)

    @property
    def queued_prefill_tokens(self) -> int:
        """Return how many known tokens are still to be computed."""
        return self.queued_prefill()[0]

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence, and begin its beam search if it wants one. Raises CapacityError where it can never
        fit."""
        longest = sequence.prompt_length + sequence.sampling.max_tokens
        if longest > self.config.max_model_len:
            raise CapacityError(f"{longest} tokens asked for, {self.config.max_model_len} fit the context")
        if sequence.num_generated >= sequence.sampling.max_results:
            raise CapacityError("nothing is left to generate")
        if sequence.sampling.beam_width:
            sequence.group = BeamGroup(sequence)
        if seq_slots(sequence, self.running) > self.config.max_num_seqs:
            raise CapacityError(f"more outputs than max_num_seqs {self.config.max_num_seqs}")
        if most_blocks(sequence, self.tables) > self.pool.num_blocks:
            raise CapacityError("the beams can never fit the KV cache together")
        if sequence.num_generated:
            self.tables.name_known_tokens(sequence)
        others = (*self.waiting, *self.running)
        sequence.cached_at_submit = expected_blocks(sequence, others, self.tables) * self.config.block_size
        self._queues.wait(sequence)

    def cancel(self, sequence: Sequence, state: SequenceState = SequenceState.CANCELLED) -> None:
        """End a sequence that has not ended yet. Its blocks go back at once, or with the step that still computes
        it."""
        if not sequence.is_over:
            self._queues.leave(sequence, state)
            self.pulls.leave(sequence)

    def cancel_request(self, request_id: RequestId, index: int | None = None) -> int:
        """End all outputs of a request, or one, and return how many sequences ended.

        An output cannot be ended alone before its request forks, or in a beam search. Then the result is 0.
        """
        ending = self._queues.of_request(request_id, index)
        if index is not None and any(sequence.group or sequence.num_outputs > 1 for sequence in ending):
            return 0
        for sequence in ending:
            self.cancel(sequence)
        return len(ending)

    # Planning

    def plan(self) -> StepPlan:
        """Choose the next step's rows and take their blocks. Do not run a plan without `has_work`."""
        assert len(self._moves) < 2, "at most one step may be in flight while another is planned"
        rows: dict[SequenceId, ScheduledRow] = {}
        budget = self.config.max_num_batched_tokens
        chunks: list[tuple[Sequence, int]] = []
        held_back = held_back_of(self.running, self.waiting, self.mixed_steps.decode_times)
        for sequence in self.running[: len(self.running) - len(held_back)]:
            if sequence.grammar is not None and self._is_held(sequence):
                continue
            start = sequence.num_scheduled
            is_plain = start < sequence.plain_until
            # The fast path of nearly every row. It reads only what the last commit has just touched.
            if (
                is_plain
                and not sequence.num_in_flight
                and sequence.group is None
                and len(sequence.tokens) == start + 1
                and budget
            ):
                sequence.num_scheduled = start + 1
                sequence.num_in_flight = 1
                rows[sequence.sequence_id] = _make_row((sequence, start, 1, True, True, ()))
                budget -= 1
                continue
            todo = tokens_to_compute(sequence)
            if todo > 1:
                if not is_background(sequence) or not (held_back or goes_before(self.running, sequence)):
                    chunks.append((sequence, todo))
            elif todo and budget and is_plain:
                self._add_row(sequence, 1, rows, is_plain=True)
                budget -= 1
            elif todo:
                budget -= self._schedule_running(sequence, min(1, budget), rows)
        budget = self.mixed_steps.prefill_budget(budget, has_decodes=bool(rows))
        for sequence, todo in chunks:
            if self.waiting and self.waiting[0].order < sequence.order:
                budget = self._admit(budget, rows, before=sequence)
            most = self._most_tokens(sequence, budget, rows)
            budget -= self._schedule_running(sequence, min(todo, most), rows)
        self._admit(budget, rows)
        if not rows:
            # What they are held back for cannot go on now.
            for sequence in held_back:
                most = self._most_tokens(sequence, budget, rows)
                budget -= self._schedule_running(sequence, min(tokens_to_compute(sequence), most), rows)
        drafts: list[ScheduledRow] = []
        if self.speculation is not None:
            drafts = draft_rows(
                self.speculation, rows.values(), config=self.config, queues=self._queues, tables=self.tables
            )
        step, self._next_step = self._next_step, self._next_step + 1
        moves = self.tables.take_moves()
        plan = StepPlan(
            step=step,
            rows=(*decodes_first(rows.values()), *drafts),
            to_host=tuple((block, slot) for slot, block in moves.to_host.items()),
            from_host=tuple(moves.from_host),
            copies=tuple(moves.copies),
            ended=self._queues.ended(),
            adapters=self._admission.place_adapters(rows.values()) if self.config.max_loras else (),
            num_drafts=len(drafts),
        )
        if plan.has_work:
            self._moves[step] = moves
            self._queues.forget_ended()
            if self.speculation is not None:
                self.speculation.forget(plan.ended)
        return plan

    def waits_for_tokens(self) -> bool:
        """Return whether the next step should be planned only once the step in flight is committed."""
        return (
            self.speculation is not None
            and not self.waiting
            and is_worth_waiting(self.speculation, self.running, self.config)
        )

    def _is_held(self, sequence: Sequence) -> bool:
        return (
            self.must_wait_for_mask is not None
            and not sequence.num_samples_in_flight
            and self.must_wait_for_mask(sequence)
        )

    def _most_tokens(self, sequence: Sequence, budget: int, rows: dict[SequenceId, ScheduledRow]) -> int:
        """Return how many tokens of the budget a sequence may take in a step that has these rows."""
        if not is_background(sequence):
            return budget
        return min(budget, background_room(rows.values(), self.mixed_steps.rates.prefill_tokens_per_second))

    def _schedule_running(
        self, sequence: Sequence, num_tokens: int, rows: dict[SequenceId, ScheduledRow]
    ) -> int:
        """Schedule `num_tokens` more positions, and preempt others if necessary. Return `num_tokens`, or 0.

        It returns 0 where there are no blocks to be had, or where the sequence itself is or becomes preempted.
        """
        if num_tokens < 1 or sequence.state is not SequenceState.RUNNING:
            return 0
        end = sequence.num_scheduled + num_tokens
        most_protected = self.config.protected_blocks
        while (missing := self.tables.missing(sequence, end)) > 0 and missing > available_blocks(
            sequence, self._queues, self.tables, most_protected
        ):
            victim = choose_victim(
                self.running,
                rows,
                self.tables,
                mode=self.config.preemption,
                rates=self.mixed_steps.rates,
                elsewhere=self.elsewhere,
            )
            if victim is None:
                return 0
            self._preempt(victim)
            if sequence in victim.sequences:
                return 0
        if missing > 0:
            self.tables.extend(sequence, end)
        self._add_row(sequence, num_tokens, rows)
        self.tables.note_scheduled(sequence)
        return num_tokens

    def _add_row(
        self,
        sequence: Sequence,
        num_tokens: int,
        rows: dict[SequenceId, ScheduledRow],
        *,
        is_plain: bool = False,
    ) -> None:
        start = sequence.num_scheduled
        end = sequence.num_scheduled = start + num_tokens
        sequence.num_in_flight += 1
        samples = end >= len(sequence.tokens) and not sequence.sampling.embeds
        rows[sequence.sequence_id] = ScheduledRow(sequence, start, num_tokens, samples, is_plain)

    def _preempt(self, victim: Victim) -> None:
        if victim.moves:
            self._give_back(victim)
            return
        for sequence in victim.sequences:
            assert not sequence.num_in_flight
            if victim.swaps and self.tables.swap_out(sequence):
                self.num_swaps += 1
            else:
                self.tables.release(sequence)
            sequence.num_preemptions += 1
            self.num_preemptions += 1
            self._queues.wait_again(sequence)

    def _give_back(self, victim: Victim) -> None:
        """End a request that goes on on another worker. Its blocks stay cached until others need the room."""
        assert self.elsewhere is not None
        self.elsewhere = self.elsewhere.without(victim.sequences, self.tables)
        request_id = victim.sequences[0].request_id
        self.num_preemptions += len(victim.sequences)
        self.num_moves += len(victim.sequences)
        self.cancel_request(request_id)
        self._given_back.append(request_id)

    def take_given_back(self) -> list[RequestId]:
        """Return the requests that were preempted, to go on on another worker, since the last call."""
        given_back, self._given_back = self._given_back, []
        return given_back

    # Admission

    def _admit(
        self, budget: int, rows: dict[SequenceId, ScheduledRow], *, before: Sequence | None = None
    ) -> int:
        """Admit waiting sequences in order and add their rows, while token budget, sequence slots and blocks last.

        With `before`, admit only what is more urgent than that sequence. Return the budget that is left.
        """
        while budget > 0 and self.waiting:
            sequence = self._admission.next(before)
            if sequence is None:
                return budget
            most = self._most_tokens(sequence, budget, rows)
            hits = self._admission.room_for(sequence) if most else None
            if hits is None:
                victim = self._admission.victim_for(sequence, rows)
                if victim is None:
                    return budget
                self._preempt(victim)
                continue
            self._admission.admit(sequence, hits)
            todo = min(len(sequence.tokens) - sequence.num_scheduled, most)
            self.tables.extend(sequence, sequence.num_scheduled + todo)
            self._add_row(sequence, todo, rows)
            self.tables.note_scheduled(sequence)
            budget -= todo
        return budget

    # Committing

    def commit(self, plan: StepPlan, step: StepTokens) -> list[Update]:
        """Apply what a step sampled, and return the updates of its sequences.

        Every plan that has work must be committed, failed or abandoned, in order. A sequence that lost a block of host
        memory waits again, and computes it.
        """
        self._end_step(plan)
        updates: list[Update] = []
        for index, (row, token) in enumerate(zip(plan.rows, step.tokens, strict=True)):
            if token != LOST_TOKEN and not row.drafts:
                updates += self._step_commit.commit(row, token, step.extras.get(index, _NO_EXTRAS))
        if self.speculation is not None and plan.num_drafts:
            commit_drafts(plan, step, updates, self._step_commit, self.speculation)
        if step.lost_slots:
            rows = zip(plan.rows, step.tokens, strict=True)
            self._step_commit.lose(step.lost_slots, [row for row, token in rows if token == LOST_TOKEN])
        return updates

    def fail(self, plan: StepPlan) -> list[Update]:
        """End every sequence of a step that raised. No block that the step computed is published.

        Where it moved blocks to or from host memory, all cached and swapped blocks there are dropped. A slot that
        cannot be read would fail every later request that hits it.
        """
        self._end_step(plan)
        self._step_commit.distrust_host_memory(plan)
        return [update for row in plan.rows for update in self._step_commit.fail(row)]

    def abandon(self, plan: StepPlan, *, moved: bool) -> None:
        """Discard a step that was planned on one which has failed. Its sequences wait again, and recompute what is
        not cached.

        Unless its blocks are sure to have `moved`, host memory is dropped as `fail` does.
        """
        self._end_step(plan, are_loaded=False)  # What it loaded is released below.
        self._queues.report_ended_again(plan.ended)
        if not moved:
            self._step_commit.distrust_host_memory(plan)
        self._step_commit.take_back(plan.rows)

    def _end_step(self, plan: StepPlan, *, are_loaded: bool = True) -> None:
        if plan.has_work:
            self.tables.release_moves(self._moves.pop(plan.step), are_loaded=are_loaded)

    def check_invariants(self) -> None:
        """Raise AssertionError where block tables, counters, names and reference counts disagree. O(blocks)."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        if self.host_cache is not None:
            self.host_cache.check_invariants()
        self._queues.check_invariants()
        self.pulls.check_invariants(self.waiting)
        swapped = sum(len(sequence.swapped.slots) for sequence in self.waiting if sequence.swapped)
        reading = sum(len(moves.read_slots) for moves in self._moves.values())
        assert swapped + reading + self.tables.swap.num_free == self.tables.swap.num_slots
