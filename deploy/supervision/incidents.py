"""Ends and returns of workers and routers, which `serve` reads from the supervisor's log and prints.

Owns the two sentences of the supervisor, both to write and to read them, and a limit on how many are printed. Does not
own finding the log (lifecycle/log_files.py).
"""

import contextlib
import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_TOLD = 3
"""Ends of one process that are printed within FLOOD_SECONDS. Further ones are only counted."""
FLOOD_SECONDS = 60.0
FIND_SECONDS = 10.0
"""Seconds between two searches for a new supervisor's log."""
MAX_LINE_CHARS = 500
_NAME = r"(?P<name>(?:worker|router)-\d+)"
_ENDED = re.compile(rf"{_NAME} ended: (?P<why>.+)")
_SERVES = re.compile(rf"{_NAME} serves at (?P<address>\S+)")


def ended_line(name: str, why: str) -> str:
    return f"{name} ended: {' '.join(why.split()) or 'it was told to'}"


def serves_line(name: str, address: str) -> str:
    return f"{name} serves at {address}"


@dataclass(slots=True)
class _Place:
    address: str = ""
    """Empty while the process does not serve."""
    why: str = ""
    num_untold: int = 0
    is_told_to_be_away: bool = False
    told_at: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TOLD))


class Incidents:
    """Turns lines of the supervisor's log into lines for the operator."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def read(self, line: str) -> None:
        """Read any line of the supervisor's log, as text or JSON, and remember what it says of a process."""
        message = _message(line)
        if found := _ENDED.search(message):
            place = self._places.setdefault(found["name"], _Place())
            place.address, place.why = "", found["why"]
            place.num_untold += 1
        elif found := _SERVES.search(message):
            self._places.setdefault(found["name"], _Place()).address = found["address"]

    def told(self, now: float) -> Iterator[str]:
        """Yield the lines to print now: ends with their reasons, and returns."""
        for name, place in self._places.items():
            is_flood = len(place.told_at) == MAX_TOLD and now - place.told_at[0] < FLOOD_SECONDS
            if place.num_untold and not is_flood:
                times = f" {place.num_untold} times" if place.num_untold > 1 else ""
                yield f"{name} has ended{times}: {place.why}"
                place.num_untold, place.is_told_to_be_away = 0, True
                place.told_at.append(now)
            if place.is_told_to_be_away and place.address:
                yield f"{name} serves again at {place.address}"
                place.is_told_to_be_away = False


def _message(line: str) -> str:
    """Return the message of a line in JSON, or the line itself. It is safe to print on a terminal."""
    message = line
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        message = str(json.loads(line)["message"])
    return "".join(char if char.isprintable() else "?" for char in message[:MAX_LINE_CHARS])
