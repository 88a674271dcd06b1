"""Remembers each worker's last pool, and since when it has been in its state, for cards of workers that are away. Pure.

Pictures are drawn only while a browser asks, so a change may be older than the picture that first shows it. The card
then tells the latest possible time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

EXACT_SECONDS = 5.0
"""Two pictures within this time tell the time of a change exactly enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    state: str
    since: float
    is_exact: bool
    at: float
    pool: dict[str, Any] | None


class LastSeen:
    """Knows the workers of the latest picture and no others, so that it stays small."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def completed(self, cards: Iterable[dict[str, Any]], now: float) -> list[dict[str, Any]]:
        """Return the cards of a picture drawn at `now`, in seconds since 1970, with what earlier pictures showed."""
        kept, completed = {}, []
        for card in cards:
            seen = _seen_now(card, self._seen.get(card["name"]), now)
            kept[card["name"]] = seen
            is_past = card["pool"] is None and seen.pool is not None
            completed.append(
                card
                | {
                    "since": seen.since,
                    "since_is_exact": seen.is_exact,
                    "last_pool": seen.pool if is_past else None,
                }
            )
        self._seen = kept
        return completed


def _seen_now(card: dict[str, Any], before: Seen | None, now: float) -> Seen:
    pool = card["pool"] or (before.pool if before else None)
    if before is not None and before.state == card["state"]:
        since, is_exact = before.since, before.is_exact
    else:
        since, is_exact = now, before is not None and now - before.at <= EXACT_SECONDS
    return Seen(state=card["state"], since=since, is_exact=is_exact, at=now, pool=pool)
