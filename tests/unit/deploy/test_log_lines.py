"""Log lines of our processes, the command `logs`, and what `serve` tells of replicas that end.

No line is lost or told twice during rotation.
"""

import io
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from blockyard.deploy.lifecycle.log_files import LocalLogs, LogFile, SupervisorLog
from blockyard.deploy.machine import state
from blockyard.deploy.machine.log_lines import Line, LineReader, merged, process_name, time_of
from blockyard.deploy.supervision.incidents import (
    FLOOD_SECONDS,
    MAX_PRINTED,
    Incidents,
    ended_line,
    serves_line,
)
from blockyard.proto.runtime.logs import JsonFormatter, LogConfig, TextFormatter, about
from hypothesis import given, settings
from hypothesis import strategies as st

from .rig import LogWriter, log_record, logs_of_trial, refusal, run


def logged(formatter: logging.Formatter, *, request_id: str = "") -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    record = logging.LogRecord("blockyard.trial", logging.WARNING, "", 0, "%d of\n%d", (1, 2), None)
    with about(request_id):
        handler.emit(record)
    return stream.getvalue()


def test_a_line_of_json_is_one_object_with_who_speaks_and_of_which_request() -> None:
    line = logged(JsonFormatter({"worker_id": "w", "incarnation": "i"}), request_id="req-1")
    assert line.count("\n") == 1
    document = json.loads(line)
    assert document.pop("time").endswith("Z")
    assert document == {
        "level": "warning",
        "logger": "blockyard.trial",
        "message": "1 of\n2",
        "worker_id": "w",
        "incarnation": "i",
        "request_id": "req-1",
    }


def test_a_line_of_text_ends_with_its_request_while_the_work_on_it_goes_on() -> None:
    assert logged(TextFormatter(), request_id="req-1").endswith(" [req-1]\n")
    assert logged(TextFormatter()).endswith("1 of\n2\n")
    assert "request_id" not in json.loads(logged(JsonFormatter({})))


@pytest.mark.parametrize(
    ("settings", "told"), [({"level": "loud"}, "LEVEL .* 'loud'"), ({"format": "xml"}, "'xml'")]
)
def test_a_level_or_format_that_there_is_not_is_named(settings: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LogConfig(**settings)


JOB, OTHER_JOB = "01000000", "02000000"


def read(name: str, text: str, request_id: str | None = None) -> list[Line]:
    return list(LineReader(name, request_id).read(text.encode().splitlines(keepends=True)))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter({"worker_id": "w"})])
def test_a_line_in_either_format_tells_its_time(formatter: logging.Formatter) -> None:
    assert time_of(log_record(1795606085.25, "x", formatter=formatter).rstrip()) == 1795606085.25


@pytest.mark.parametrize("text", ["", "{", '{"time": 3}', "{}", "2026-x", "Traceback", "[" * 9999, "1234"])
def test_what_is_no_line_of_ours_has_no_time(text: str) -> None:
    assert time_of(text) is None


def test_lines_without_a_time_go_with_the_line_before_them() -> None:
    first = read("a", log_record(10, "failed") + "Traceback:\n  ValueError\n" + log_record(30, "after"))
    second = read("b", log_record(20, "between"))
    told = [(line.name, line.text.split(": ")[-1]) for line in merged([first, second])]
    assert told == [
        ("a", "failed"),
        ("a", "Traceback:"),
        ("a", "  ValueError"),
        ("b", "between"),
        ("a", "after"),
    ]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5)), max_size=4))
def test_merged_logs_keep_the_order_within_each_and_lose_nothing(times: list[list[int]]) -> None:
    logs = [
        [
            Line(seconds=seconds, name=str(log), text=str(number))
            for number, seconds in enumerate(sorted(given))
        ]
        for log, given in enumerate(times)
    ]
    found = list(merged(logs))
    assert [line.seconds for line in found] == sorted(line.seconds for line in found)
    for log, lines in enumerate(logs):
        assert [line for line in found if line.name == str(log)] == lines


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter({})])
def test_a_request_is_found_by_its_whole_id_with_its_traceback(formatter: logging.Formatter) -> None:
    text = "".join(
        (
            log_record(1, "begun", "req-1", formatter),
            log_record(2, "another", "req-12", formatter),
            log_record(3, "none of them", "", formatter),
            log_record(4, "failed", "req-1", formatter),
            "Traceback\n",
            log_record(5, "after", "my-req-1", formatter),
            log_record(6, "req-1 goes on elsewhere", "", formatter),
        )
    )
    assert [line.seconds for line in read("a", text, "req-1")] == [1, 4, 4, 6]
    assert read("a", text, "req") == []


@pytest.mark.parametrize(
    ("actor", "name"),
    [
        ("worker-12(checkpoint)", "worker-12"),
        ("worker-12 rank 1(checkpoint)", "worker-12 rank 1"),
        ("RankActor", "worker rank"),
        ("router-0", "router-0"),
        ("supervisor(2 workers, 1 routers)", "supervisor"),
        ("WorkerActor", "worker"),
        ("Supervisor", "supervisor"),
        ("SomebodysActor", None),
        ("worker-of-somebody", None),
    ],
)
def test_a_process_is_named_by_the_marker_of_ray(actor: str, name: str | None) -> None:
    assert process_name(f":job_id:{JOB}\n:actor_name:WorkerActor\n:actor_name:{actor}\n".encode()) == name
    assert process_name(f":job_id:{JOB}\n".encode()) is None


@settings(deadline=None)
@given(st.lists(st.sampled_from(["write", "rotate", "read"]), max_size=40))
def test_whatever_is_rotated_between_looks_no_line_is_lost_or_told_twice(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    writer, logs = LogWriter(folder, "worker-0", 7), LocalLogs(folder)
    (file,) = logs.files()
    found: list[bytes] = []
    for step in [*steps, "read"]:
        match step:
            case "write":
                writer.write_line()
            case "rotate":
                writer.rotate()
            case "read":
                found += logs.lines(file, to_the_end=False)
    told = [line.decode().split()[-1] for line in found if not line.startswith(b":")]
    assert told == [str(number) for number in range(writer.num_lines)]


def test_a_line_that_is_not_finished_is_told_once_it_is(tmp_path: Path) -> None:
    writer, logs = LogWriter(tmp_path, "worker-0", 7), LocalLogs(tmp_path)
    (file,) = logs.files()

    def new_lines(to_the_end: bool = False) -> list[bytes]:
        return [line for line in logs.lines(file, to_the_end=to_the_end) if not line.startswith(b":")]

    writer.write("half")
    assert new_lines() == []
    writer.write(" and half\nlast")
    assert new_lines() == [b"half and half\n"]
    assert new_lines(to_the_end=True) == [b"last"]


def test_a_log_whose_beginning_was_rotated_away_is_shown_under_its_process(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, "worker-0", 7)
    writer.path.write_text(log_record(1, "late"))
    assert [file.name for file in LocalLogs(tmp_path).files()] == ["pid-7"]


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Path:
    return logs_of_trial(tmp_path)


def test_the_logs_of_all_processes_come_by_time_with_their_names(folder: Path) -> None:
    lines = run("logs --cluster trial").stdout.splitlines()
    assert [(line.split()[0], line.split(": ")[-1]) for line in lines] == [
        ("worker-0", "of a former life"),
        ("supervisor", "of superv [req-0]"),
        ("router-0", "of router [req-1]"),
        ("worker-0", "of worker [req-2]"),
    ]


def test_one_process_the_last_lines_and_one_request_can_be_chosen(folder: Path) -> None:
    def shown(options: str) -> str:
        return run(f"logs {options} --cluster trial").stdout

    assert [line[:4] for line in shown("worker-0").splitlines()] == ["1970", "1970"]
    assert shown("worker-0 -n 1 --prefix").split(": ")[-1] == "of worker [req-2]\n"
    assert shown("--request req-1").split()[0] == "router-0"
    assert shown("--request req") == ""


def test_what_cannot_be_shown_has_a_sentence(folder: Path) -> None:
    unknown = refusal("logs worker-7 --cluster trial", code=1)
    assert unknown == "Error: no log has the name 'worker-7' (known: router-0, supervisor, worker-0)"
    trial = state.load("trial")
    for dashboard, told in (
        (
            "http://127.0.0.1:1",
            "Ray's dashboard at http://127.0.0.1:1, which reads the nodes' logs, does not",
        ),
        (None, f"find them in {folder} of each node"),
    ):
        state.save(replace(trial, head=None, dashboard_url=dashboard))
        assert told in refusal("logs --cluster trial", code=1)
    state.save(trial)
    shutil.rmtree(folder)
    gone = refusal("logs --cluster trial", code=1)
    assert gone.startswith("Error: the logs of this cluster are gone: ")


KILLED = "its process was killed by SIGKILL"


def due_lines(incidents: Incidents, now: float, *lines: str) -> list[str]:
    for line in lines:
        incidents.read(line)
    return list(incidents.due_lines(now))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter({})])
def test_an_end_and_a_return_are_one_line_each_and_a_first_start_is_none(
    formatter: logging.Formatter, tmp_path: Path
) -> None:
    supervisor = LogWriter(tmp_path, "supervisor(2 workers, 1 routers)", 7)
    worker = LogWriter(tmp_path, "worker-0(demo)", 8)
    log = SupervisorLog(LocalLogs(tmp_path))
    supervisor.write(log_record(1, serves_line("worker-0", "a:1"), formatter=formatter))
    worker.write(log_record(1, ended_line("worker-1", "of its own log"), formatter=formatter))
    assert log.due_lines(0.0) == []
    supervisor.write(log_record(2, ended_line("worker-0", KILLED), formatter=formatter))
    assert log.due_lines(1.0) == [f"worker-0 has ended: {KILLED}"]
    assert log.due_lines(2.0) == []
    supervisor.write(log_record(3, serves_line("worker-0", "a:2"), formatter=formatter))
    assert log.due_lines(3.0) == ["worker-0 serves again at a:2"]


def test_an_end_that_was_asked_for_says_so_a_reason_is_one_line_and_a_lost_log_tells_nothing(
    tmp_path: Path,
) -> None:
    told = due_lines(Incidents(), 0.0, ended_line("router-0", ""))
    assert told == ["router-0 has ended: it was told to stop"]
    assert ended_line("worker-0", "ValueError: first\nsecond") == "worker-0 ended: ValueError: first second"
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
