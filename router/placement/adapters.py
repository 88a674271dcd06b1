"""Adapters: the cost of a LoRA adapter that a worker would have to load for a request.

- 0 on a worker that has it, or loads it for another request;
- `load` where a slot is free;
- `load + horizon x rate x reload` where another adapter makes room: the cheapest that is not in use;
- `load + memory_full_ms` where all slots are in use, so that the request waits for one.

`rate` is the victim's request rate on that worker, and `reload` the time to load it again. So requests stay where their
adapter is. A busy adapter spreads once the wait for it costs more than a load elsewhere. An adapter that many requests
name is not evicted for one that few do.

Pure. Does not own what a worker reports (cluster/worker_view.py), or the sum of all costs (scoring.py).
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from blockyard.router.placement.config import PlacementConfig

PRIOR_BYTES_PER_MS = 2e6
"""Rate at which adapters load, until the worker has measured it."""
HORIZON_SECONDS = 30.0
"""Time for which an evicted adapter is expected to be missed. Its requests in that time count as loads."""
MOST_LOAD_MS = 600_000.0
"""A longer load is not believed."""
MOST_RATE = 1e6
"""Requests a second beyond which a rate is not believed."""


class Adapter(NamedTuple):
    """The adapter that a request names."""

    fingerprint: str
    num_bytes: int = 0
    """Bytes of its weights."""


class Resident(NamedTuple):
    """An adapter on a worker's device."""

    fingerprint: str
    load_ms: float
    """Time that its last load took."""
    requests_per_second: float
    """Requests for it that reach this worker."""
    is_used: bool
    """Whether running sequences use it. It stays until there are none."""


class AdapterSlots(NamedTuple):
    """The adapters of one worker."""

    num_slots: int
    """Adapters that its device holds at once. 0: it serves none."""
    residents: Sequence[Resident] = ()
    coming: frozenset[str] = frozenset()
    """Fingerprints of adapters that it loads, or will load, for requests which this router has placed there."""
    load_ms: float = 0.0
    """Average time of its last loads. 0 until one was measured."""

    @property
    def at_hand(self) -> frozenset[str]:
        """Return the fingerprints of the adapters that a request for them need not load."""
        return self.coming.union(one.fingerprint for one in self.residents)


NO_SLOTS = AdapterSlots(num_slots=0)


class AdapterPrices(NamedTuple):
    """Prices of one worker for any adapter that it has not, in the table of loads."""

    load_ms: float
    """Measured time of a load. 0: not measured."""
    eviction_ms: float
    """NOT_SERVED_MS on a worker that serves no adapters."""

    @classmethod
    def of(cls, slots: AdapterSlots, config: PlacementConfig) -> "AdapterPrices":
        if not slots.num_slots:
            return NO_PRICES
        return cls(load_ms(slots.load_ms, 0), eviction_ms(slots, config))


NOT_SERVED_MS = 1e15
"""Price that no worker with slots reaches."""
NO_PRICES = AdapterPrices(0.0, NOT_SERVED_MS)


def adapter_ms(adapter: Adapter, slots: AdapterSlots, config: PlacementConfig) -> float:
    """Return the cost of the adapter for a request on this worker, which must serve adapters."""
    if adapter.fingerprint in slots.at_hand:
        return 0.0
    return load_ms(slots.load_ms, adapter.num_bytes) + eviction_ms(slots, config)


def load_ms(measured_ms: float, num_bytes: int) -> float:
    """Return the time to load an adapter: the measured one, or a guess by its bytes where none was measured."""
    return (
        measured_ms if 0 < measured_ms <= MOST_LOAD_MS else min(num_bytes / PRIOR_BYTES_PER_MS, MOST_LOAD_MS)
    )


def eviction_ms(slots: AdapterSlots, config: PlacementConfig) -> float:
    """Return the cost of the room for one more adapter."""
    taken = len(slots.at_hand) - slots.num_slots
    if taken < 0:
        return 0.0
    idle = sorted(
        _loss_ms(one) for one in slots.residents if not one.is_used and one.fingerprint not in slots.coming
    )
    # Those that come take the cheapest places first.
    return idle[taken] if taken < len(idle) else config.memory_full_ms


def _loss_ms(victim: Resident) -> float:
    """Return the cost of loading an adapter again for the requests that will miss it."""
    rate = victim.requests_per_second
    rate = rate if 0 <= rate <= MOST_RATE else 0.0
    reload_ms = victim.load_ms if 0 <= victim.load_ms < inf else 0.0
    return HORIZON_SECONDS * rate * min(reload_ms, MOST_LOAD_MS)
