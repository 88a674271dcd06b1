"""`blockyard logs`: no line is lost or repeated during rotation, and each mistake has a clear message."""

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.lifecycle.log_files import LocalLogs
from blockyard.deploy.machine import state
from blockyard.deploy.machine.log_lines import Line, LineReader, merged, process_name, time_of
from blockyard.deploy.machine.processes import ProcessIdentity
from blockyard.proto.runtime.logs import JsonFormatter, TextFormatter, about
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

JOB, OTHER_JOB = "01000000", "02000000"


def record(
    created: float, message: str, request_id: str = "", formatter: logging.Formatter | None = None
) -> str:
    made = logging.LogRecord("blockyard.trial", logging.INFO, "", 0, message, (), None)
    made.created, made.msecs = created, created % 1 * 1000
    with about(request_id):
        return (formatter or TextFormatter()).format(made) + "\n"


def read(name: str, text: str, request_id: str | None = None) -> list[Line]:
    return list(LineReader(name, request_id).read(text.encode().splitlines(keepends=True)))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter({"worker_id": "w"})])
def test_a_line_in_either_format_tells_its_time(formatter: logging.Formatter) -> None:
    assert time_of(record(1795606085.25, "x", formatter=formatter).rstrip()) == 1795606085.25


@pytest.mark.parametrize("text", ["", "{", '{"time": 3}', "{}", "2026-x", "Traceback", "[" * 9999, "1234"])
def test_what_is_no_line_of_ours_has_no_time(text: str) -> None:
    assert time_of(text) is None


def test_lines_without_a_time_go_with_the_line_before_them() -> None:
    first = read("a", record(10, "failed") + "Traceback:\n  ValueError\n" + record(30, "after"))
    second = read("b", record(20, "between"))
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
            record(1, "begun", "req-1", formatter),
            record(2, "another", "req-12", formatter),
            record(3, "none of them", "", formatter),
            record(4, "failed", "req-1", formatter),
            "Traceback\n",
            record(5, "after", "my-req-1", formatter),
            record(6, "req-1 goes on elsewhere", "", formatter),
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


def _age(path: Path) -> int:
    return int(path.suffix[1:])


class Writer:
    """An actor's log, as Ray writes and rotates it."""

    def __init__(self, folder: Path, name: str, pid: int, job: str = JOB) -> None:
        self.path = folder / f"worker-{pid:056x}-{job}-{pid}.err"
        self.num_lines = 0
        self.path.write_text(f":job_id:{job}\n:actor_name:{name}\n")

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def write_line(self) -> None:
        self.write(record(1000 + self.num_lines, f"line {self.num_lines}"))
        self.num_lines += 1

    def rotate(self) -> None:
        aged = sorted(self.path.parent.glob(f"{self.path.name}.*"), key=_age, reverse=True)
        for path in aged:
            path.rename(path.with_suffix(f".{_age(path) + 1}"))
        self.path.rename(f"{self.path}.1")
        self.path.touch()


@settings(deadline=None)
@given(st.lists(st.sampled_from(["write", "rotate", "read"]), max_size=40))
def test_whatever_is_rotated_between_looks_no_line_is_lost_or_told_twice(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    writer, logs = Writer(folder, "worker-0", 7), LocalLogs(folder)
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
    writer, logs = Writer(tmp_path, "worker-0", 7), LocalLogs(tmp_path)
    (file,) = logs.files()

    def new_lines(to_the_end: bool = False) -> list[bytes]:
        return [line for line in logs.lines(file, to_the_end=to_the_end) if not line.startswith(b":")]

    writer.write("half")
    assert new_lines() == []
    writer.write(" and half\nlast")
    assert new_lines() == [b"half and half\n"]
    assert new_lines(to_the_end=True) == [b"last"]


def test_a_log_whose_beginning_was_rotated_away_is_shown_under_its_process(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "worker-0", 7)
    writer.path.write_text(record(1, "late"))
    assert [file.name for file in LocalLogs(tmp_path).files()] == ["pid-7"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The logs of a cluster called `trial`, and of another that has joined its Ray."""
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.delenv("BLOCKYARD_CLUSTER", raising=False)
    folder = tmp_path / "logs"
    folder.mkdir()
    for number, name in enumerate(("supervisor(1 workers, 1 routers)", "router-0", "worker-0(demo)")):
        Writer(folder, name, 100 + number).write(record(2000 + number, f"of {name[:6]}", f"req-{number}"))
    Writer(folder, "worker-0(demo)", 90).write(record(1000, "of a former life"))
    for number, name in enumerate(("supervisor(2 workers, 1 routers)", "worker-1(demo)")):
        Writer(folder, name, 200 + number, OTHER_JOB).write(record(3000, "of another cluster"))
    (folder / "raylet.out").write_text("of Ray\n")
    head = state.HeadState(session=7, processes=(ProcessIdentity(pid=7, start_ticks=1),))
    state.save(
        state.ClusterState(
            cluster="trial",
            model="demo",
            secret="s",
            ray_address="127.0.0.1:1",
            logs_directory=str(folder),
            head=head,
        )
    )
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["logs", *arguments, "--cluster", "trial"])


def test_the_logs_of_all_processes_come_by_time_with_their_names(folder: Path) -> None:
    lines = run().stdout.splitlines()
    assert [(line.split()[0], line.split(": ")[-1]) for line in lines] == [
        ("worker-0", "of a former life"),
        ("supervisor", "of superv [req-0]"),
        ("router-0", "of router [req-1]"),
        ("worker-0", "of worker [req-2]"),
    ]


def test_one_process_the_last_lines_and_one_request_can_be_chosen(folder: Path) -> None:
    assert [line[:4] for line in run("worker-0").stdout.splitlines()] == ["1970", "1970"]
    assert run("worker-0", "-n", "1", "--prefix").stdout.split(": ")[-1] == "of worker [req-2]\n"
    assert run("--request", "req-1").stdout.split()[0] == "router-0"
    assert run("--request", "req").stdout == ""


def test_what_cannot_be_shown_has_a_sentence(folder: Path) -> None:
    unknown = run("worker-7")
    assert (unknown.exit_code, unknown.output) == (
        1,
        "Error: no log has the name 'worker-7' (known: router-0, supervisor, worker-0)\n",
    )
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    gone = run()
    assert gone.exit_code == 1
    assert gone.output.startswith("Error: the logs of this cluster are gone: ")
    state.forget(state.load("trial"))
    assert run().output.startswith("Error: no cluster 'trial' is known here")


def test_a_joined_ray_whose_dashboard_does_not_answer_is_named_at_once(folder: Path) -> None:
    remembered = state.load("trial")
    joined = {"head": None, "dashboard_url": "http://127.0.0.1:1"}
    state.save(state.ClusterState(**{**_fields(remembered), **joined}))
    refused = run()
    assert refused.exit_code == 1
    assert (
        "Ray's dashboard at http://127.0.0.1:1, which reads the nodes' logs, does not answer"
        in refused.output
    )
    state.save(state.ClusterState(**{**_fields(remembered), **joined, "dashboard_url": None}))
    assert f"find them in {folder} of each node" in run().output


def _fields(cluster: state.ClusterState) -> dict[str, object]:
    return {name: getattr(cluster, name) for name in state.ClusterState.__dataclass_fields__}


@pytest.mark.ci
def test_following_shows_what_comes_and_new_processes_until_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "blockyard.deploy.cli", "logs", "-f", "--cluster", "trial"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        shown = [process.stdout.readline() for _ in range(4)]
        Writer(folder, "worker-1(demo)", 103).write(record(time.time(), "new"))
        shown.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
        watchdog.cancel()
    assert shown[4].startswith("worker-1 ")
    assert (process.returncode, rest, errors) == (0, "", "")


def test_a_reader_that_goes_away_is_no_error(folder: Path) -> None:
    Writer(folder, "worker-2(demo)", 104).write("x" * 100 + "\n" + "y" * 1_000_000 + "\n")
    command = [sys.executable, "-m", "blockyard.deploy.cli", "logs", "--cluster", "trial"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
