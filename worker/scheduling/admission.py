"""Admission: which waiting sequence runs next, whether there is room for it, and what makes room.

Owns the choice, and the slots of adapters. Does not add rows to a step or preempt (scheduler.py).
"""

from collections.abc import Callable, Iterable

from blockyard.worker.cache.adapter_slots import AdapterGate, AdapterSlots, tokens_left
from blockyard.worker.cache.block_tables import BlockTables, Hits
from blockyard.worker.scheduling.background import goes_before, is_background, num_background
from blockyard.worker.scheduling.capacity import fits, seq_slots, seq_slots_taken
from blockyard.worker.scheduling.config import SchedulerConfig
from blockyard.worker.scheduling.mixed_steps import Rates
from blockyard.worker.scheduling.preemption import Victim, choose_victim
from blockyard.worker.scheduling.queues import Queues
from blockyard.worker.sequences.adapter import Adapter
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import ScheduledRow


class Admission:
    """Admits the waiting sequences of one scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        queues: Queues,
        tables: BlockTables,
        adapters: AdapterSlots,
        is_held: Callable[[Sequence], bool],
        rates: Rates,
    ) -> None:
        """`is_held` says of a sequence with a grammar whether it waits for a mask."""
        self._config = config
        self._queues = queues
        self._tables = tables
        self._adapters = adapters
        self._is_held = is_held
        self._rates = rates

    def next(self, before: Sequence | None = None) -> Sequence | None:
        """Return the waiting sequence that is to be admitted next, or None. With `before`, return only what is more
        urgent than that sequence."""
        sequence = self._queues.next_waiting(self._is_held, lacks_slot=self._gate())
        if sequence is not None and is_background(sequence) and goes_before(self._queues.running, sequence):
            # However long it has waited, it is in nobody's way.
            sequence = self._queues.next_waiting(self._is_held, lacks_slot=self._gate(), skips=is_background)
        is_late = before is not None and sequence is not None and sequence.order >= before.order
        return None if is_late else sequence

    def room_for(self, sequence: Sequence) -> Hits | None:
        """Return the cached blocks of a waiting sequence, or None where there is no room for it."""
        running = self._queues.running
        if seq_slots_taken(running) + seq_slots(sequence, running) > self._config.max_num_seqs:
            return None
        hits = self._tables.match(sequence)
        has_room = fits(
            sequence,
            hits,
            queues=self._queues,
            tables=self._tables,
            is_reserved=self._is_reserved(sequence),
            max_protected=self._config.protected_blocks,
        )
        return hits if has_room else None

    def _is_reserved(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions >= self._config.max_preemptions

    def victim_for(self, sequence: Sequence, rows: dict[SequenceId, ScheduledRow]) -> Victim | None:
        """Return background work to preempt for a waiting sequence that is not. Return None if there is none."""
        running = self._queues.running
        count = num_background(running)
        if is_background(sequence) or not count:
            return None
        # The first one is never chosen.
        return choose_victim(
            [running[0], *running[max(len(running) - count, 1) :]],
            rows,
            self._tables,
            mode=self._config.preemption,
            rates=self._rates,
        )

    def admit(self, sequence: Sequence, hits: Hits) -> None:
        """Let a waiting sequence run on its cached blocks, `hits`."""
        sequence.is_reserved = self._is_reserved(sequence)
        self._queues.run(sequence)
        self._tables.start(sequence, hits)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(len(hits) * self._config.block_size, sequence.prompt_length)

    def place_adapters(self, rows: Iterable[ScheduledRow]) -> tuple[tuple[int, Adapter], ...]:
        """Return the adapters of a step with their slots. Those of running sequences stay where they are."""
        wanted = [row.sequence.adapter for row in rows if row.sequence.adapter is not None]
        held = self._queues.holding if wanted else ()
        return self._adapters.place(wanted, (one.adapter for one in held if one.adapter is not None))

    def _gate(self) -> Callable[[Sequence], bool] | None:
        """Return the gate of one pass over the waiting sequences, or None without slots for adapters."""
        slots = self._config.max_loras
        return AdapterGate(slots, lambda: tokens_left(self._queues.holding)).holds if slots else None
