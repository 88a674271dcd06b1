"""Parses log lines: the time, process and request of each. Pure.

Reads the format of proto/runtime/logs.py, and the markers that Ray writes into an actor's log. Does not open files
(lifecycle/log_files.py).
"""

import heapq
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

NO_TIME = 0.0
_ACTOR = re.compile(rb"^:actor_name:(.+)$", re.MULTILINE)
_MARKERS = (b":job_id:", b":actor_name:", b":task_name:")
"""Prefixes of lines that Ray writes for its own use."""
_PROCESS = re.compile(r"(worker-\d+( rank \d+)?|router-\d+|supervisor)\b")
_CLASSES = {
    "WorkerActor": "worker",
    "RankActor": "worker rank",
    "RouterActor": "router",
    "Supervisor": "supervisor",
}
"""Names of our processes by the class name that Ray writes until an actor's constructor has ended."""
_TIME_CHARS = len("2026-11-25 11:24:07,649")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a log."""

    seconds: float
    """Seconds since the epoch. A line without a time has the time of the line before it, or else NO_TIME."""
    name: str
    """Process that wrote the line."""
    text: str


class LineReader:
    """Parses the lines of one process in order.

    A line without a time, such as one of a traceback, gets the time and request of the line before it.
    """

    def __init__(self, name: str, request_id: str | None = None) -> None:
        self._name = name
        self._request = None if request_id is None else _whole_word(request_id)
        self._seconds = NO_TIME
        self._is_wanted = request_id is None

    def read(self, raw_lines: Iterable[bytes]) -> Iterator[Line]:
        """Parse and yield lines, without Ray's markers. With a request id, yield only lines about that request."""
        for raw in raw_lines:
            if raw.startswith(_MARKERS):
                continue
            text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            seconds = time_of(text)
            if seconds is not None:
                self._seconds = seconds
            if self._request is not None:
                goes_on = seconds is None and self._is_wanted
                self._is_wanted = goes_on or self._request.search(text) is not None
            if self._is_wanted:
                yield Line(seconds=self._seconds, name=self._name, text=text)


def merged(logs: Iterable[Iterable[Line]]) -> Iterator[Line]:
    """Merge logs by time. Lines of one process keep their order."""
    return heapq.merge(*logs, key=lambda line: line.seconds)


def time_of(text: str) -> float | None:
    """Return a text or JSON line's time in seconds since the epoch, or None for a line without a time."""
    try:
        if text.startswith("{"):
            return datetime.fromisoformat(json.loads(text)["time"]).timestamp()
        if not text[:4].isdigit():
            return None
        return datetime.fromisoformat(text[:_TIME_CHARS].replace(",", ".")).timestamp()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def process_name(head: bytes) -> str | None:
    """Return the name of the Blockyard process whose log begins with `head`. None for another program."""
    found = _ACTOR.findall(head)
    if not found:
        return None
    actor = found[-1].decode("utf-8", errors="replace").strip()
    match = _PROCESS.match(actor)
    return match[1] if match else _CLASSES.get(actor)


def _whole_word(request_id: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.:-]){re.escape(request_id)}(?![\w:-]|\.\w)")
