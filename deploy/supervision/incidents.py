"""Incidents: ends and returns of workers and routers, which `serve` reads from the supervisor's log and prints.

Owns writing and parsing the supervisor's two log lines, and a limit on how many are printed. Does not own finding the
log (lifecycle/log_files.py).
"""

import contextlib
import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_PRINTED = 3
"""Limit on the printed ends of one worker or router within FLOOD_SECONDS. Further ones are only counted."""
FLOOD_SECONDS = 60.0
FIND_SECONDS = 10.0
"""Seconds between two searches for a new supervisor's log."""
MAX_LINE_CHARS = 500
_NAME = r"(?P<name>(?:worker|router)-\d+)"
_ENDED = re.compile(rf"{_NAME} ended: (?P<why>.+)")
_SERVES = re.compile(rf"{_NAME} serves at (?P<address>\S+)")


def ended_line(name: str, why: str) -> str:
    return f"{name} ended: {' '.join(why.split()) or 'it was told to stop'}"


def serves_line(name: str, address: str) -> str:
    return f"{name} serves at {address}"


@dataclass(slots=True)
class _Replica:
    """Ends and returns of one worker or router."""

    address: str = ""
    """Empty while the process does not serve."""
    why: str = ""
    num_unprinted: int = 0
    is_printed_as_ended: bool = False
    printed_at: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_PRINTED))


class Incidents:
    """Turns lines of the supervisor's log into lines for the operator."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}

    def read(self, line: str) -> None:
        """Read any line of the supervisor's log, as text or JSON. Remember which process ended or serves."""
        message = _message(line)
        if found := _ENDED.search(message):
            replica = self._replicas.setdefault(found["name"], _Replica())
            replica.address, replica.why = "", found["why"]
            replica.num_unprinted += 1
        elif found := _SERVES.search(message):
            self._replicas.setdefault(found["name"], _Replica()).address = found["address"]

    def due_lines(self, now: float) -> Iterator[str]:
        """Yield the lines to print now, each once: ends with their reasons, and returns to service."""
        for name, replica in self._replicas.items():
            printed_at = replica.printed_at
            is_flood = len(printed_at) == MAX_PRINTED and now - printed_at[0] < FLOOD_SECONDS
            if replica.num_unprinted and not is_flood:
                times = f" {replica.num_unprinted} times" if replica.num_unprinted > 1 else ""
                yield f"{name} has ended{times}: {replica.why}"
                replica.num_unprinted, replica.is_printed_as_ended = 0, True
                printed_at.append(now)
            if replica.is_printed_as_ended and replica.address:
                yield f"{name} serves again at {replica.address}"
                replica.is_printed_as_ended = False


def _message(line: str) -> str:
    """Return the message of a JSON line, or the line itself, safe to print on a terminal."""
    message = line
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        message = str(json.loads(line)["message"])
    return "".join(char if char.isprintable() else "?" for char in message[:MAX_LINE_CHARS])
