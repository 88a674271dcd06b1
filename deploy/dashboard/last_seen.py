"""Keeps data across pictures: a silent worker's last pool, each worker's last change of state, and rates. Pure.

Pictures are drawn only while a page is open. A change may be older than the first picture that shows it. Then its time
is the latest possible one.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

EXACT_SECONDS = 5.0
"""Longest time between two pictures for which a change of state between them counts as exactly timed."""
RATE_WINDOW_SECONDS = 60.0
MIN_RATE_SECONDS = 5.0
"""Shortest time over which a rate is computed."""
COUNTERS = ("evictions", "preemptions", "pulled_blocks", "lent_blocks", "generated_tokens")
"""Counters of a pool that the page shows. They only grow while the worker lives."""


class Rates:
    """Turns counters into rates per minute, from the pictures of the last minute."""

    def __init__(self) -> None:
        self._samples: dict[Hashable, deque[tuple[float, dict[str, int]]]] = {}

    def per_minute(
        self, now: float, sources: Mapping[Hashable, Mapping[str, int]]
    ) -> dict[Hashable, dict[str, float]]:
        """Return the rates of each source: an incarnation of a worker, or a router. A new source has none yet.

        `now` is on the caller's monotonic clock. A source that is not in `sources` is forgotten.
        """
        samples = {source: self._samples.get(source, deque()) for source in sources}
        rates = {}
        for source, known in samples.items():
            counts = dict(sources[source])
            if known and any(counts[name] < known[-1][1][name] for name in counts):
                known.clear()
            while known and now - known[0][0] > RATE_WINDOW_SECONDS:
                known.popleft()
            known.append((now, counts))
            since, first = known[0]
            elapsed = now - since
            is_rate = elapsed >= MIN_RATE_SECONDS
            rates[source] = (
                {name: 60.0 * (counts[name] - first[name]) / elapsed for name in counts} if is_rate else {}
            )
        self._samples = samples
        return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorker:
    """One worker on the latest picture. `since` is its last change of state, and `at` the time of the picture.

    Both are in seconds since the epoch. `is_exact` tells whether `since` is exact or only the latest possible time.
    """

    state: str
    since: float
    is_exact: bool
    at: float
    pool: dict[str, Any] | None


class LastSeen:
    """Remembers states and pools of the workers on the latest picture, and of no others, so that it stays small."""

    def __init__(self) -> None:
        self._seen: dict[str, SeenWorker] = {}

    def completed(
        self, cards: Iterable[dict[str, Any]], now: float, *, is_router_up: bool = True
    ) -> list[dict[str, Any]]:
        """Return the cards of a picture drawn at `now`, with data from earlier pictures: last changes and last pools.

        `is_router_up` is false while no router answers. Then the states are unknown, and the last known ones stay.
        """
        kept: dict[str, SeenWorker] = {}
        completed = []
        for card in cards:
            before = self._seen.get(card["name"])
            seen = _seen_now(card, before, now) if is_router_up else before
            if seen is not None:
                kept[card["name"]] = seen
            is_dated = is_router_up and seen is not None
            completed.append(
                card
                | {
                    "since": seen.since if seen and is_dated else None,
                    "since_is_exact": bool(seen and seen.is_exact),
                    "last_pool": seen.pool if seen and card["pool"] is None else None,
                }
            )
        self._seen = kept
        return completed


def _seen_now(card: dict[str, Any], before: SeenWorker | None, now: float) -> SeenWorker:
    pool = card["pool"] or (before.pool if before else None)
    if before is not None and before.state == card["state"]:
        since, is_exact = before.since, before.is_exact
    else:
        since, is_exact = now, before is not None and now - before.at <= EXACT_SECONDS
    return SeenWorker(state=card["state"], since=since, is_exact=is_exact, at=now, pool=pool)
