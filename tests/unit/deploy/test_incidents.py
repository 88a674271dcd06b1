"""Lines of `serve` about replicas that end and return: one line each, and no flood."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockyard.deploy.lifecycle.log_files import LocalLogs, LogFile, SupervisorLog
from blockyard.deploy.supervision.incidents import (
    FLOOD_SECONDS,
    MAX_PRINTED,
    Incidents,
    ended_line,
    serves_line,
)
from blockyard.proto.runtime.logs import JsonFormatter, TextFormatter
from hypothesis import given
from hypothesis import strategies as st

from .test_logs_command import Writer, record

KILLED = "its process was killed by SIGKILL"


def due_lines(incidents: Incidents, now: float, *lines: str) -> list[str]:
    for line in lines:
        incidents.read(line)
    return list(incidents.due_lines(now))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter({})])
def test_an_end_and_a_return_are_one_line_each_and_a_first_start_is_none(
    formatter: logging.Formatter, tmp_path: Path
) -> None:
    supervisor = Writer(tmp_path, "supervisor(2 workers, 1 routers)", 7)
    worker = Writer(tmp_path, "worker-0(demo)", 8)
    log = SupervisorLog(LocalLogs(tmp_path))
    supervisor.write(record(1, serves_line("worker-0", "a:1"), formatter=formatter))
    worker.write(record(1, ended_line("worker-1", "of its own log"), formatter=formatter))
    assert log.due_lines(0.0) == []
    supervisor.write(record(2, ended_line("worker-0", KILLED), formatter=formatter))
    assert log.due_lines(1.0) == [f"worker-0 has ended: {KILLED}"]
    assert log.due_lines(2.0) == []
    supervisor.write(record(3, serves_line("worker-0", "a:2"), formatter=formatter))
    assert log.due_lines(3.0) == ["worker-0 serves again at a:2"]


def test_an_end_that_was_asked_for_says_so_and_a_reason_is_one_line() -> None:
    assert due_lines(Incidents(), 0.0, ended_line("router-0", "")) == [
        "router-0 has ended: it was told to stop"
    ]
    assert ended_line("worker-0", "ValueError: first\nsecond") == "worker-0 ended: ValueError: first second"


def test_a_log_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    assert SupervisorLog(LocalLogs(tmp_path / "gone")).due_lines(0.0) == []


@given(
    pauses=st.lists(st.floats(0.1, 20.0), min_size=1, max_size=60),
    comes_back=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_ends_are_no_flood_and_the_last_word_is_true(pauses: list[float], comes_back: list[bool]) -> None:
    incidents, now = Incidents(), 0.0
    said: list[tuple[float, str]] = []
    for pause, returns in zip(pauses, comes_back, strict=False):
        now += pause
        lines = [ended_line("worker-0", KILLED)] + ([serves_line("worker-0", "a:1")] if returns else [])
        said += [(now, line) for line in due_lines(incidents, now, *lines)]
    ends = [at for at, line in said if "has ended" in line]
    for first, later in zip(ends, ends[MAX_PRINTED:], strict=False):
        assert later - first >= FLOOD_SECONDS
    said += [(now, line) for line in incidents.due_lines(now + FLOOD_SECONDS)]
    assert ("serves again" in said[-1][1]) == comes_back[len(pauses) - 1]
    counted = [int(line.split()[3]) if " times" in line else 1 for _, line in said if "has ended" in line]
    assert sum(counted) == len(pauses), "each end is told or counted"


class StrangeLogs:
    """Logs as a joined Ray's dashboard could answer: not what was asked for, and no text for a terminal."""

    def __init__(self, lines: list[bytes] | Exception) -> None:
        self._lines = lines

    def files(self) -> list[LogFile]:
        return [LogFile(key="1", name="supervisor", parts=())]

    def lines(self, file: LogFile, *, to_the_end: bool) -> Iterator[bytes]:
        if isinstance(self._lines, Exception):
            raise self._lines
        yield from self._lines


@pytest.mark.parametrize(
    "error", [ConnectionError("gone"), KeyError("pid"), TypeError("str"), ValueError("x")]
)
def test_a_log_that_cannot_be_read_tells_nothing_and_ends_nothing(error: Exception) -> None:
    assert SupervisorLog(StrangeLogs(error)).due_lines(0.0) == []


def test_what_a_log_says_is_cut_and_reaches_no_terminal_as_a_control_sequence() -> None:
    line = f"worker-0 ended: \x1b]0;title\x07 {'x' * 10_000}".encode()
    (text,) = SupervisorLog(StrangeLogs([line])).due_lines(0.0)
    assert text.isprintable()
    assert len(text) < 600
