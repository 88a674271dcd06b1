"""Adapter slots: which adapters a device holds, and which waiting sequences may therefore begin.

A device has a fixed number of slots. Each running sequence with an adapter needs its adapter in one of them. So the
running sequences together use at most as many adapters as there are slots. An adapter that no running sequence uses
stays until its slot is needed: the one that requests name least often goes first (AdapterRates).

A waiting sequence whose adapter finds no slot is passed by others. So that it is not passed for ever, one adapter in
use gets no more sequences from behind it. That is the adapter whose last sequence is nearest to its end. This distance
falls with every token, and nothing behind the waiting sequence adds to it, so a slot becomes free. Pure: no tensors.
"""

from collections.abc import Callable, Iterable, Mapping
from math import exp, inf, log

from blockyard.worker.sequences.adapter import Adapter
from blockyard.worker.sequences.sequence import Sequence

RATE_SECONDS = 60.0
"""Time constant of the averages."""


class AdapterRates:
    """Rates of the requests of one engine, by the fingerprint of their adapter: averages that decay.

    All decay alike, so their order changes with requests alone. An adapter's score is the logarithm of its rate at time
    0 of the clock: one number, whose order is that of the rates at any time.
    """

    def __init__(self) -> None:
        self._scores: dict[str, float] = {}

    def note(self, fingerprint: str, now: float) -> None:
        """Count a request."""
        age = now / RATE_SECONDS
        self._scores[fingerprint] = age + log(exp(self.score(fingerprint) - age) + 1)

    def score(self, fingerprint: str) -> float:
        """Return a number that is higher for a higher rate."""
        return self._scores.get(fingerprint, -inf)

    def per_second(self, fingerprint: str, now: float) -> float:
        return exp(min(self.score(fingerprint) - now / RATE_SECONDS, 100.0)) / RATE_SECONDS

    def forget(self, fingerprint: str) -> None:
        self._scores.pop(fingerprint, None)


class AdapterSlots:
    """The adapters in the slots of one device. `num_slots` 0 serves none."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.rates = AdapterRates()
        self._held: dict[str, tuple[int, Adapter]] = {}
        """Slot and adapter by fingerprint, the least recently used first."""

    @property
    def resident(self) -> list[Adapter]:
        return [adapter for _, adapter in self._held.values()]

    def place(
        self, adapters: Iterable[Adapter], in_use: Iterable[Adapter]
    ) -> tuple[tuple[int, Adapter], ...]:
        """Give each adapter of a step a slot, and return the pairs. What is `in_use` keeps its slot.

        Both together must be at most as many as there are slots.
        """
        kept = {adapter.fingerprint for adapter in in_use}
        placed: dict[str, tuple[int, Adapter]] = {}
        for adapter in adapters:
            key = adapter.fingerprint
            if key in placed:
                continue
            slot = self._held.pop(key)[0] if key in self._held else self._free_slot(kept | placed.keys())
            placed[key] = self._held[key] = slot, adapter
        return tuple(sorted(placed.values(), key=lambda pair: pair[0]))

    def _free_slot(self, kept: set[str]) -> int:
        if len(self._held) < self.num_slots:
            return next(iter(set(range(self.num_slots)) - {slot for slot, _ in self._held.values()}))
        # Of several with one rate, the least recently used.
        rarest = min((key for key in self._held if key not in kept), key=self.rates.score)
        return self._held.pop(rarest)[0]


class AdapterGate:
    """Decides in one pass over the waiting sequences, in their order, which ones their adapters hold back."""

    def __init__(self, num_slots: int, tokens_left: Callable[[], Mapping[str, int]]) -> None:
        """`tokens_left` returns the adapters in use by fingerprint, each with the most tokens that a sequence of it has
        still to compute. It is called for the first sequence with an adapter."""
        self._num_slots = num_slots
        self._count = tokens_left
        self._tokens_left: Mapping[str, int] | None = None
        self._emptied: str | None = None
        """The adapter that gets no more sequences, so that its slot becomes free."""

    def holds(self, sequence: Sequence) -> bool:
        """Return whether a sequence must wait for a slot, or for one that goes before it."""
        if sequence.adapter is None:
            return False
        if self._tokens_left is None:
            self._tokens_left = self._count()
        left, key = self._tokens_left, sequence.adapter.fingerprint
        if key in left:
            return key == self._emptied
        if len(left) < self._num_slots:
            return False
        if self._emptied is None:
            self._emptied = min(left, key=lambda used: (left[used], used))
        return True


def tokens_left(sequences: Iterable[Sequence]) -> dict[str, int]:
    """Return for each adapter that these sequences use the most tokens that one of them has still to compute."""
    left: dict[str, int] = {}
    for sequence in sequences:
        if sequence.adapter is not None:
            key = sequence.adapter.fingerprint
            longest = sequence.prompt_length + sequence.sampling.max_results - sequence.num_computed
            left[key] = max(left.get(key, 0), 0 if sequence.is_over else longest)
    return left
