"""What `serve` says of workers and routers that end and come back, read from the supervisor's log.

Owns the supervisor's two sentences, both ways, and how many of them are told. Does not own finding the log
(log_files.py).
"""

import contextlib
import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from blockyard.deploy.log_files import LogFile, Logs
from blockyard.deploy.places import SUPERVISOR_NAME

MAX_TOLD = 3
"""Ends of one place that are told within FLOOD_SECONDS. Those beyond are counted."""
FLOOD_SECONDS = 60.0
FIND_SECONDS = 10.0
"""Between looks for another supervisor's log."""
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
    """Empty while it does not serve."""
    why: str = ""
    num_untold: int = 0
    is_told_to_be_away: bool = False
    told_at: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TOLD))


class Incidents:
    """Takes what the supervisor logs, and gives what an operator is told."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def read(self, line: str) -> None:
        """Any line of the supervisor's log, as text or JSON. Remembers what it says of a place."""
        message = _message(line)
        if found := _ENDED.search(message):
            place = self._places.setdefault(found["name"], _Place())
            place.address, place.why = "", found["why"]
            place.num_untold += 1
        elif found := _SERVES.search(message):
            self._places.setdefault(found["name"], _Place()).address = found["address"]

    def told(self, now: float) -> Iterator[str]:
        """What there is to say at this time: ends with their reasons, and that a place serves again."""
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


@dataclass(slots=True)
class SupervisorLog:
    """Reads on in the log of a cluster's supervisor, and of the next one after its death."""

    logs: Logs
    _incidents: Incidents = field(default_factory=Incidents, init=False)
    _files: list[LogFile] = field(default_factory=list, init=False)
    _found_at: float = field(default=-inf, init=False)

    def told(self, now: float) -> list[str]:
        """What has happened since the last call. Nothing while the log cannot be read."""
        with contextlib.suppress(OSError):
            if now - self._found_at >= FIND_SECONDS:
                self._found_at = now
                self._files = [file for file in self.logs.files() if file.name == SUPERVISOR_NAME]
            for file in self._files:
                for line in self.logs.lines(file, to_the_end=False):
                    self._incidents.read(line.decode("utf-8", errors="replace").rstrip())
        return list(self._incidents.told(now))


def _message(line: str) -> str:
    """Of a line in the format of JSON; of another all of it."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(line)["message"])
    return line
