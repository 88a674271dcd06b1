"""Adapter book: the adapters that an engine serves, and what their loads to the device cost.

Does not own slots (adapter_slots.py), names or files (../lora/). Pure: no tensors, clocks or I/O.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from blockyard.worker.cache.adapter_slots import AdapterSlots
from blockyard.worker.sequences.adapter import Adapter, ResidentAdapter
from blockyard.worker.sequences.sequence import Sequence

SHARE_OF_LAST = 0.3
"""Weight of the last load in the average."""


class UnknownAdapter(ValueError):
    """The engine serves no adapter of this content."""


class AdapterBook:
    """The adapters of one engine, by fingerprint of their content."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._known: dict[str, Adapter] = {}
        self._seconds: dict[str, float] = {}
        self.average_seconds = 0.0
        self.num_loads = 0

    def add(self, adapter: Adapter) -> None:
        """Serve an adapter from now on. Content that is served already stays the object that it is."""
        self._known.setdefault(adapter.fingerprint, adapter)

    def remove(self, fingerprint: str) -> None:
        """Take no more requests for an adapter. Those that run keep it, and its slot is reused in time."""
        self._known.pop(fingerprint, None)
        self._seconds.pop(fingerprint, None)
        self._slots.rates.forget(fingerprint)

    def note_request(self, fingerprint: str, now: float) -> None:
        """Count a request for an adapter. Empty: it is for the bare model."""
        if fingerprint:
            self._slots.rates.note(fingerprint, now)

    def find(self, fingerprint: str) -> Adapter | None:
        """Return the adapter of a request, or None for the bare model. Raises UnknownAdapter."""
        if not fingerprint:
            return None
        if fingerprint not in self._known:
            raise UnknownAdapter(f"no adapter has the fingerprint {fingerprint}")
        return self._known[fingerprint]

    def note_loads(self, seconds: Mapping[str, float]) -> None:
        """Take note of the time of loads, by fingerprint."""
        for fingerprint, taken in seconds.items():
            self._seconds[fingerprint] = taken
            self.num_loads += 1
            share = SHARE_OF_LAST if self.average_seconds else 1.0
            self.average_seconds += share * (taken - self.average_seconds)

    def resident(self, running: Iterable[Sequence], now: float) -> tuple[ResidentAdapter, ...]:
        """Return the adapters in slots, and how many of the running sequences use each."""
        held = self._slots.resident
        used = Counter(one.adapter.fingerprint for one in running if one.adapter is not None) if held else {}
        return tuple(
            ResidentAdapter(
                fingerprint=adapter.fingerprint,
                rank=adapter.rank,
                num_bytes=adapter.num_bytes,
                load_seconds=self._seconds.get(adapter.fingerprint, 0.0),
                running=used.get(adapter.fingerprint, 0),
                requests_per_second=self._slots.rates.per_second(adapter.fingerprint, now),
            )
            for adapter in held
        )
