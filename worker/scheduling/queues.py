"""Queues of a scheduler: the waiting, the running, and those that have ended while a step in flight computes them.

Owns their order and the end of sequences. Does not decide which sequence runs.
"""

from bisect import insort
from collections.abc import Callable
from itertools import count

from blockyard.worker.cache.block_tables import BlockTables
from blockyard.worker.sequences.identifiers import RequestId, SequenceId
from blockyard.worker.sequences.sequence import Sequence, SequenceState

FIRST_FORK = 2**40
"""Lowest id of forks. Ids of submitted sequences are below it."""


class Queues:
    """Queues over the block tables of one pool. `waiting` and `running` are in order of rank."""

    def __init__(self, tables: BlockTables) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reserved: list[Sequence] = []
        """Running sequences that hold, or are to get, all blocks that they can ever need."""
        self._tables = tables
        self._leaving: dict[SequenceId, Sequence] = {}
        self._ended: list[SequenceId] = []
        self._fork_ids = count(FIRST_FORK)

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running or self._leaving)

    @property
    def is_any_leaving(self) -> bool:
        """Whether a step in flight still computes sequences that have ended."""
        return bool(self._leaving)

    @property
    def holding(self) -> tuple[Sequence, ...]:
        """The running sequences, and those that have ended while a step in flight computes them."""
        return (*self.running, *self._leaving.values())

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence, new or no longer running, among the waiting ones in order of rank."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            if sequence.is_reserved:
                self.reserved.remove(sequence)
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=lambda waiting: waiting.order)

    def wait_again(self, sequence: Sequence) -> None:
        """Put a sequence that no longer runs among the waiting ones. A beam search forgets its candidates."""
        if sequence.group is not None:
            sequence.group.forget_candidates()
        self.wait(sequence)

    def next_waiting(
        self,
        is_held: Callable[[Sequence], bool],
        *,
        lacks_slot: Callable[[Sequence], bool] | None = None,
        skips: Callable[[Sequence], bool] | None = None,
    ) -> Sequence | None:
        """Return the first waiting sequence that needs neither blocks from elsewhere nor a mask first.

        `is_held` says of one with a grammar whether it waits for a mask, and `lacks_slot` whether one waits for a slot
        of an adapter. Beams of a running search come first: it needs all. What `skips` is true of is left out.
        """
        for sequence in self.running:
            for beam in sequence.group.live if sequence.group is not None else ():
                if beam.state is SequenceState.WAITING and not (skips is not None and skips(beam)):
                    return beam
        for sequence in self.waiting:
            if (
                not sequence.is_pulling
                and (skips is None or not skips(sequence))
                and (sequence.grammar is None or not is_held(sequence))
                and (lacks_slot is None or not lacks_slot(sequence))
            ):
                return sequence
        return None

    def run(self, sequence: Sequence) -> None:
        """Move a waiting sequence, or a fork that never waited, to the running ones.

        The caller sets `is_reserved` of the sequence before.
        """
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=lambda running: running.order)
        if sequence.is_reserved:
            self.reserved.append(sequence)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """Start a running sequence with the tokens of its parent and shared blocks, and return it.

        `index` is the output of the request that it becomes.
        """
        is_beam = parent.group is not None
        child = Sequence(
            sequence_id=SequenceId(next(self._fork_ids)),
            tokens=parent.tokens[:],
            prompt_length=parent.prompt_length,
            sampling=parent.sampling,
            names=list(parent.names),
            arrival=parent.arrival,
            rank=parent.rank,
            priority=parent.priority,
            tenant=parent.tenant,
            client=parent.client,
            request_id=parent.request_id,
            index=index,
            group=parent.group,
            grammar=parent.grammar,
            adapter=parent.adapter,
            state=SequenceState.RUNNING,
            cached_at_submit=parent.cached_at_submit,
            cached_tokens=parent.cached_tokens,
            deadline=parent.deadline,
            is_reserved=parent.is_reserved and is_beam,
            num_preemptions=parent.num_preemptions if is_beam else 0,
            may_move=parent.may_move,
            expected_pause_seconds=parent.expected_pause_seconds,
        )
        self._tables.fork(parent, child)
        self.run(child)
        return child

    def leave(self, sequence: Sequence, state: SequenceState) -> None:
        """End a sequence in `state`. Its blocks go back at once, or with the step that still computes it."""
        is_running = sequence.state is not SequenceState.WAITING
        (self.running if is_running else self.waiting).remove(sequence)
        if is_running and sequence.is_reserved:
            self.reserved.remove(sequence)
        sequence.state = state
        self._tables.forget_swapped(sequence)
        self._ended.append(sequence.sequence_id)
        self._leaving[sequence.sequence_id] = sequence
        self.release_if_idle(sequence)

    def release_if_idle(self, sequence: Sequence) -> None:
        """Give back the blocks of an ended sequence, unless a step in flight may still write them."""
        if not sequence.num_in_flight and self._leaving.pop(sequence.sequence_id, None) is not None:
            self._tables.release(sequence)

    def of_request(self, request_id: RequestId, index: int | None) -> list[Sequence]:
        """Return the waiting and running sequences of a request, or of one of its outputs."""
        return [
            sequence
            for sequence in (*self.waiting, *self.running)
            if sequence.request_id == request_id and index in (None, sequence.index)
        ]

    def ended(self) -> tuple[SequenceId, ...]:
        """Return the ids of the sequences that have ended since the last `forget_ended`."""
        return tuple(self._ended)

    def forget_ended(self) -> None:
        self._ended.clear()

    def report_ended_again(self, ended: tuple[SequenceId, ...]) -> None:
        """Add these to `ended` again: the step whose plan had them may never have begun."""
        self._ended += ended

    def check_invariants(self) -> None:
        """Raise AssertionError where block tables, counters, names and reference counts disagree. O(blocks)."""
        tables = self._tables
        pool = tables.pool
        holders = [0] * pool.num_blocks
        requests: dict[int, set[RequestId]] = {}
        for sequence in (*self.running, *self._leaving.values()):
            end = sequence.num_scheduled + sequence.num_drafted
            assert len(sequence.block_table) == tables.blocks_for(end)
            assert sequence.num_in_flight > sequence.num_drafted or not sequence.num_drafted
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert sequence.num_computed <= sequence.num_scheduled <= len(sequence.tokens) + 1
            tables.check_plain(sequence)
            for index, block in enumerate(sequence.block_table):
                holders[block] += 1
                if index >= sequence.num_named:
                    requests.setdefault(block, set()).add(sequence.request_id)
        assert all(len(ids) == 1 for ids in requests.values()), (
            "an unnamed block is shared beyond its request"
        )
        for block, held in tables.held_beside_sequences().items():
            holders[block] += held
        for sequence in self.waiting:
            assert not sequence.block_table
            assert not sequence.num_in_flight
        for sequence in (*self.running, *self.waiting):
            assert not sequence.is_over
        reserved = {sequence.sequence_id for sequence in self.running if sequence.is_reserved}
        assert sorted(sequence.sequence_id for sequence in self.reserved) == sorted(reserved)
        references = [pool.references(block) for block in pool.blocks()]
        assert holders == references, "a reference is held by no sequence, or a sequence holds none"
