"""Parses log lines: when each was written, by which process, and about which request. Pure.

Reads what proto/runtime/logs.py writes, and the markers that Ray puts into the file of an actor. Opens no file
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
"""Ray writes these words at the start of a line, for its own use."""
_PROCESS = re.compile(r"(worker-\d+|router-\d+|supervisor)\b")
_CLASSES = {"WorkerActor": "worker", "RouterActor": "router", "Supervisor": "supervisor"}
"""What Ray calls an actor before its constructor has ended."""
_TIME_CHARS = len("2026-11-25 11:24:07,649")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a log."""

    seconds: float
    """Since the epoch. A line without a time has that of the line before it; NO_TIME where there is none."""
    name: str
    """The process that wrote it."""
    text: str


class LineReader:
    """Reads the lines of one process in their order. A line without a time, such as one of a traceback, goes with the
    line before it: it is of the same time and about the same request."""

    def __init__(self, name: str, request_id: str | None = None) -> None:
        self._name = name
        self._request = None if request_id is None else _whole_word(request_id)
        self._seconds = NO_TIME
        self._is_wanted = request_id is None

    def read(self, raw_lines: Iterable[bytes]) -> Iterator[Line]:
        """Leaves out Ray's markers, and lines about another request or none where one was asked for."""
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
    """Merges logs by time. Keeps the order within each, and lines of one time and process together."""
    return heapq.merge(*logs, key=lambda line: line.seconds)


def time_of(text: str) -> float | None:
    """Return a line's time in seconds since the epoch, in either format; None for a line without a time."""
    try:
        if text.startswith("{"):
            return datetime.fromisoformat(json.loads(text)["time"]).timestamp()
        if not text[:4].isdigit():
            return None
        return datetime.fromisoformat(text[:_TIME_CHARS].replace(",", ".")).timestamp()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def process_name(head: bytes) -> str | None:
    """Return the name of our process whose log begins like this; None for another program's."""
    found = _ACTOR.findall(head)
    if not found:
        return None
    actor = found[-1].decode("utf-8", errors="replace").strip()
    match = _PROCESS.match(actor)
    return match[1] if match else _CLASSES.get(actor)


def _whole_word(request_id: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.:-]){re.escape(request_id)}(?![\w:-]|\.\w)")
