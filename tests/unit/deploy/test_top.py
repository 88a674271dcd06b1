"""`blockyard top`: rates between two samples, a screen that fits, and a real terminal with a real router."""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.machine import state
from blockyard.deploy.views.top import (
    SPARKS,
    Look,
    as_document,
    bar,
    rows_of,
    screen,
    sparkline,
    total_rate,
    totals_of,
)
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import Client
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.system.processes import SIMULATED, Processes, processes

TOP = (sys.executable, "-m", "blockyard.deploy.cli", "top", "--interval", "0.2")
READY = cluster_pb2.WORKER_STATE_READY


def worker(name: str = "worker-0", incarnation: str = "a", **load: int) -> cluster_pb2.Worker:
    return cluster_pb2.Worker(
        worker_id=name,
        incarnation=incarnation,
        state=READY,
        total_blocks=100,
        load=cluster_pb2.WorkerLoad(**load),
        index=cluster_pb2.WorkerIndex(lag_seconds=0.25),
    )


def look(at_seconds: float, *workers: cluster_pb2.Worker) -> Look:
    info = cluster_pb2.ClusterInfo(cluster="trial", requests_running=3, requests_waiting=2)
    return Look(at_seconds=at_seconds, info=info, workers=workers)


def test_of_several_models_each_has_a_row_of_totals_above_its_workers() -> None:
    def two_models(at_seconds: float, *workers: cluster_pb2.Worker) -> Look:
        seen = look(at_seconds, *workers)
        seen.info.model.id = "first"
        for name in ("first", "second"):
            seen.info.models.add(id=name)
        return seen

    def of_model(model: str, name: str, **load: int) -> cluster_pb2.Worker:
        one = worker(name, incarnation=name, **load)
        one.model = model
        return one

    before = two_models(
        1.0,
        of_model("second", "b-0", generated_tokens=10, prompt_tokens=100, cached_tokens=0),
        of_model("first", "a-0", generated_tokens=5),
    )
    now = two_models(
        3.0,
        of_model(
            "second",
            "b-0",
            running=1,
            used_blocks=50,
            generated_tokens=30,
            prompt_tokens=200,
            cached_tokens=50,
        ),
        of_model("first", "a-0", running=2, generated_tokens=25),
        of_model("first", "a-1", running=3, used_blocks=100, generated_tokens=999),
    )
    first, second = totals = totals_of(now, before)
    assert (first.model, first.running, first.kv_usage, first.generated_tokens_per_second) == (
        "first",
        5,
        0.5,
        10.0,
    )
    assert (second.model, second.state, second.hit_rate) == ("second", "1 of 1", 0.5)
    output = StringIO()
    shown = screen(now, rows_of(now, before), [], columns=80, totals=totals)
    Console(file=output, width=80, highlight=False).print(shown)
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("trial: first, second on")
    assert [line.split()[0] for line in lines[-5:]] == ["first", "a-0", "a-1", "second", "b-0"]
    document = as_document(now, rows_of(now, before), totals)
    assert [(one["model"], one["running"]) for one in document["models"]] == [("first", 5), ("second", 1)]
    assert [one["model"] for one in document["workers"]] == ["second", "first", "first"]
    one_model = look(1.0, worker())
    assert totals_of(one_model, None) == []


def lines_of(seen: Look, rates: list[float], columns: int, trouble: str = "") -> list[str]:
    output = StringIO()
    rows = rows_of(seen, None)
    shown = screen(seen, rows, rates, columns=columns, trouble=trouble)
    Console(file=output, width=columns, highlight=False).print(shown)
    return output.getvalue().splitlines()


def test_rates_are_what_came_between_two_looks() -> None:
    before = look(10.0, worker(prompt_tokens=100, cached_tokens=100, generated_tokens=50))
    now = look(12.0, worker(prompt_tokens=300, cached_tokens=150, generated_tokens=70, used_blocks=25))
    (row,) = rows_of(now, before)
    assert (row.prompt_tokens_per_second, row.generated_tokens_per_second) == (100.0, 10.0)
    assert (row.hit_rate, row.kv_usage, row.index_lag_seconds) == (0.25, 0.25, 0.25)
    assert total_rate([row, row]) == 20.0


def test_the_first_look_has_no_rates_and_the_hit_rate_since_the_start() -> None:
    (row,) = rows_of(look(1.0, worker(prompt_tokens=4, cached_tokens=1, generated_tokens=9)), None)
    assert (row.prompt_tokens_per_second, row.generated_tokens_per_second, row.hit_rate) == (0.0, 0.0, 0.25)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_worker_of_several_ranks_is_marked_as_such(columns: int) -> None:
    several = worker("worker-1")
    several.num_ranks = 2
    told = lines_of(look(1.0, worker(), several), [], columns)
    assert [line.partition(" READY")[0].rstrip() for line in told[-2:]] == ["worker-0", "worker-1 x2"]
    assert [
        row["ranks"] for row in as_document(look(1.0, several), rows_of(look(1.0, several), None))["workers"]
    ] == [2]


def test_a_worker_that_was_restarted_begins_anew_and_never_has_a_negative_rate() -> None:
    before = look(1.0, worker(incarnation="a", generated_tokens=900, prompt_tokens=900))
    (row,) = rows_of(look(2.0, worker(incarnation="b", generated_tokens=5, prompt_tokens=7)), before)
    assert (row.generated_tokens_per_second, row.prompt_tokens_per_second) == (0.0, 0.0)


@pytest.mark.parametrize("back", [{"generated_tokens": 18}, {"prompt_tokens": 18}, {"cached_tokens": 18}])
def test_counters_that_go_back_give_no_negative_rate_and_no_hit_rate_outside_its_range(
    back: dict[str, int],
) -> None:
    counted = {"generated_tokens": 1000, "prompt_tokens": 1000, "cached_tokens": 500}
    (row,) = rows_of(look(2.0, worker(**(counted | back))), look(1.0, worker(**counted)))
    assert min(row.generated_tokens_per_second, row.prompt_tokens_per_second) >= 0.0
    assert row.hit_rate is None or row.hit_rate >= 0.0


def test_a_worker_that_served_nothing_has_no_hit_rate() -> None:
    (row,) = rows_of(look(1.0, worker()), None)
    assert row.hit_rate is None


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_the_screen_keeps_to_its_columns_and_a_line_a_worker(columns: int) -> None:
    workers = [
        worker(
            name=f"worker-with-a-long-name-{number}",
            running=256,
            waiting=64,
            generated_tokens=10**9,
            pulled_blocks=10**6,
        )
        for number in range(5)
    ]
    workers[0].state, workers[0].state_reason = cluster_pb2.WORKER_STATE_REFUSED, "another model " * 5
    lines = lines_of(look(1.0, *workers), [float(number) for number in range(60)], columns)
    assert max(map(len, lines)) <= columns
    assert len(lines) == 4 + len(workers)


def test_pulls_show_once_a_worker_has_some_and_the_terminal_is_wide() -> None:
    before = look(1.0, worker(pulled_blocks=10, lent_blocks=5))
    now = look(3.0, worker(pulled_blocks=110, lent_blocks=5, pulling_bytes=7, failed_pulls=2))
    (row,) = rows_of(now, before)
    assert (row.pulled_blocks_per_second, row.lent_blocks_per_second) == (50.0, 0.0)
    assert (row.pulling_bytes, row.lending_bytes, row.failed_pulls) == (7, 0, 2)
    wide, narrow = (lines_of(now, [0.0], columns)[3].split() for columns in (100, 80))
    assert wide[-2:] == ["pull/s", "lend/s"]
    assert "pull/s" not in narrow + lines_of(look(1.0, worker()), [0.0], 100)[3].split()


def test_at_80_columns_every_number_of_a_worker_is_whole() -> None:
    busy = worker(running=256, waiting=64, used_blocks=99, preemptions=1234, prompt_tokens=9, cached_tokens=9)
    line = lines_of(look(1.0, busy), [0.0], 80)[-1]
    assert [part for part in line.split() if part.strip("█░")] == [
        *("worker-0", "READY", "256", "64", "99%", "100%", "0", "0", "1234")
    ]


def test_trouble_is_said_below_what_was_seen_last() -> None:
    lines = lines_of(look(1.0, worker()), [0.0], 80, trouble="no router answers at 127.0.0.1:1")
    assert lines[-1] == "no router answers at 127.0.0.1:1"


@pytest.mark.parametrize(
    ("rates", "columns", "line"),
    [([], 9, ""), ([0.0, 0.0], 9, "▁▁"), ([0.0, 7.0, 3.5], 9, "▁█▄"), ([9.0, 0.0, 1.0], 2, "▁█")],
)
def test_the_sparkline_is_of_the_last_looks_against_their_largest(
    rates: list[float], columns: int, line: str
) -> None:
    assert sparkline(rates, columns) == line


@given(st.lists(st.floats() | st.integers(-1000, 1000), max_size=70), st.integers(1, 80))
def test_a_sparkline_has_a_cell_for_each_of_the_last_numbers_whatever_they_are(
    rates: list[float], columns: int
) -> None:
    line = sparkline(rates, columns)
    assert len(line) == min(len(rates), columns)
    assert set(line) <= set(SPARKS)
    assert sparkline([rate if isfinite(rate) and rate > 0 else 0.0 for rate in rates], columns) == line


@pytest.mark.parametrize(("share", "cells"), [(-1.0, "░░░░"), (0.0, "░░░░"), (0.5, "██░░"), (2.0, "████")])
def test_a_bar_is_as_long_as_its_share(share: float, cells: str) -> None:
    assert bar(share, 4) == cells


def test_the_document_of_a_look_is_json() -> None:
    seen = look(1.0, worker())
    document = json.loads(json.dumps(as_document(seen, rows_of(seen, None))))
    assert (document["cluster"], document["requests_running"]) == ("trial", 3)
    assert document["workers"][0]["worker"] == "worker-0"


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_router_that_is_away_is_an_error_and_no_traceback(output: str) -> None:
    result = CliRunner().invoke(main, ["top", "--once", "--router", "127.0.0.1:1", "--output", output])
    assert result.exit_code == 1
    assert result.output.startswith("Error: no router answers at 127.0.0.1:1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("top")) as running:
        first = running.add_worker("worker-0", *SIMULATED)
        running.start(first)
        running.add_router("router-0", workers=[first.address])
        running.start(running.routers["router-0"])
        address = running.routers["router-0"].address
        with Client(address, timeout_seconds=60) as client:
            client.generate("def add(a, b):", max_tokens=4)
        yield running


@contextmanager
def generating(address: str) -> Iterator[None]:
    """One request runs as long as the context."""
    ended = threading.Event()

    def work() -> None:
        with Client(address, timeout_seconds=120) as client:
            while not ended.is_set():
                client.generate("def add(a, b):", max_tokens=60, ignore_eos=True)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.cluster
def test_once_shows_what_a_real_worker_did_between_two_looks(cluster: Processes, tmp_path: Path) -> None:
    address = cluster.routers["router-0"].address
    with generating(address):
        result = CliRunner().invoke(
            main,
            ["top", "--once", "--output", "json", "--router", address],
            env={state.HOME_VARIABLE: str(tmp_path)},
        )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (row,) = document["workers"]
    assert row["state"] == "READY"
    assert row["generated_tokens_per_second"] > 0
    assert document["generated_tokens_per_second"] == row["generated_tokens_per_second"]


@pytest.mark.cluster
def test_in_a_pipe_it_shows_one_plain_screen_and_ends(cluster: Processes, tmp_path: Path) -> None:
    shown = subprocess.run(
        [*TOP, "--router", cluster.routers["router-0"].address],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, state.HOME_VARIABLE: str(tmp_path)},
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert "worker-0" in shown.stdout
    assert "tokens/s" in shown.stdout
    assert "\x1b" not in shown.stdout


@pytest.mark.cluster
def test_documents_end_with_the_pipe_that_they_go_to(cluster: Processes, tmp_path: Path) -> None:
    address = cluster.routers["router-0"].address
    with subprocess.Popen(
        [*TOP, "--output", "json", "--router", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, state.HOME_VARIABLE: str(tmp_path)},
        text=True,
    ) as top:
        try:
            assert top.stdout is not None
            assert top.stderr is not None
            assert json.loads(top.stdout.readline())["cluster"]
            top.stdout.close()
            top.wait(60)
            assert "Traceback" not in top.stderr.read()
        finally:
            top.kill()


class Terminal:
    """`blockyard top` on a terminal of 80 columns."""

    def __init__(self, *arguments: str) -> None:
        self._main, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [*TOP, *arguments]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command,
            stdin=there,
            stdout=there,
            stderr=there,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # or Ctrl-C would go to nobody
        )
        os.close(there)
        self.text = ""

    def read_until(self, told: str, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while told not in self.text:
            assert time.monotonic() < until, f"{told!r} was not shown:\n{self.text[-2000:]}"
            if select.select([self._main], [], [], 0.2)[0]:
                self.text += os.read(self._main, 65536).decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self._main, key.encode())

    def code(self, seconds: float = 30.0) -> int:
        """Wait for the process to end and return its exit code. Keep reading its output, or it cannot end."""
        until = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until:
            if select.select([self._main], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._main, 65536).decode(errors="replace")
                except OSError:
                    break  # its side is closed
        return self.process.wait(max(until - time.monotonic(), 1.0))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self._main)


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path))
    opened: list[Terminal] = []

    def open_one(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.mark.cluster
@pytest.mark.parametrize("key", ["q", "\x03"])
def test_on_a_terminal_it_lives_until_a_key_ends_it(cluster: Processes, terminal: Any, key: str) -> None:
    top = terminal("--router", cluster.routers["router-0"].address)
    top.read_until("worker-0")
    top.read_until("tokens/s")
    top.press(key)
    assert top.code() == 0
    assert "Traceback" not in top.text
    assert "\x1b[?1049l" in top.text, "the terminal is given back as it was"


@pytest.mark.cluster
def test_a_router_that_dies_meanwhile_is_said_and_found_again(cluster: Processes, terminal: Any) -> None:
    router = cluster.routers["router-0"]
    top = terminal("--router", router.address)
    top.read_until("worker-0")
    router.kill()
    top.read_until("no router answers")
    cluster.start(router)
    top.text = ""
    top.read_until("READY")
    top.press("q")
    assert top.code() == 0
    assert "Traceback" not in top.text
