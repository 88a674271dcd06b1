"""Commands against real routers and workers: what they print, `top` on a terminal, logs of a failed request."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.demo.__main__ import alone_line
from blockyard.deploy.demo.prompts import DEMO_GROUPS
from blockyard.deploy.demo.traffic import LatencyAlone, chats_of, time_alone
from blockyard.deploy.requests.waiting_messages import SILENCE_SECONDS
from blockyard.router.client import BlockyardError, Client

from tests.system.processes import SIMULATED, Processes, processes
from tests.unit.deploy.rig import LogWriter, document, log_record, logs_of_trial, refusal, run

from .rig import blockyard

PROMPT = "marke-5kzq: def join_paths(first, second):\n    " * 4
MARK = "marke-5kzq"
FAULT_TOKEN = 7
REQUEST_ID = "req-of-the-operator.1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Yield a worker that fails on a token and its routers. The second router wants tokens."""
    folder = tmp_path_factory.mktemp("commands")
    made = document("token new --name ann --role user --auth-file", str(folder / "tokens.json"))
    logged = ("--log-format", "json", "--log-level", "debug")
    with processes(folder, with_redis=True) as running:
        worker = running.add_worker(
            "worker-0", *SIMULATED, "--simulated-fault", f"{FAULT_TOKEN}:raise", *logged
        )
        routers = [
            running.add_router(name, *options, *logged, "--router-id", name, workers=[worker.address])
            for name, options in (
                ("router-0", ()),
                ("router-1", ("--auth-file", str(folder / "tokens.json"))),
            )
        ]
        running.start(worker, *routers)
        for router, token in zip(routers, ("", made["token"]), strict=True):
            with Client(router.address, timeout_seconds=60, token=token) as client:
                client.generate(PROMPT, max_tokens=4)
        yield running


@pytest.fixture
def router(cluster: Processes) -> str:
    """Return the option that names the first router."""
    return f"--router {cluster.routers['router-0'].address}"


def test_explain_prints_each_term_of_each_worker(router: str) -> None:
    shown = run(f"explain {router}", PROMPT)
    assert shown.exit_code == 0, shown.output
    headings = "worker cached queue prefill decode memory interference total cost"
    assert all(heading in shown.output for heading in headings.split())
    explained = document(f"explain {router}", PROMPT)
    assert explained["chosen_worker_id"] == "worker-0"
    (candidate,) = explained["candidates"]
    assert candidate["cached_tokens"] + candidate["uncached_tokens"] > 16
    parts = ("queue_ms", "prefill_ms", "host_load_ms", "decode_ms", "memory_ms", "interference_ms")
    assert sum(candidate[part] for part in parts) == pytest.approx(candidate["total_ms"])
    told = refusal(f"explain --session-id 'a b' --cache-salt 'c d' {router}", PROMPT, code=1)
    assert "session_id: must be" in told, "all that is wrong with a question is told at once"
    assert "cache_salt: must be" in told


@pytest.mark.parametrize("command", ["blocks", "drain", "resume", "flush"])
def test_a_worker_that_there_is_not_is_named_with_those_that_there_are(router: str, command: str) -> None:
    told = refusal(f"{command} worker-9 {router}", code=1)
    assert told == "Error: no worker is called 'worker-9' (known: worker-0)"


def test_who_drains_the_last_worker_is_told_and_who_waits_for_one_is_told_what_ends_it(router: str) -> None:
    back, generate = f"resume worker-0 {router}`", f"generate {router} --max-tokens 4"
    refused = refusal(f"drain worker-0 {router}", code=1)
    assert "no other worker takes requests" in refused
    assert "--force" in refused
    drained = run(f"drain worker-0 {router} --force")
    assert "worker-0 is the only worker that takes requests" in drained.stderr
    assert back in drained.stderr
    resumed = threading.Timer(2 * SILENCE_SECONDS, run, (f"resume worker-0 {router}",))
    resumed.start()
    waited = run(generate, PROMPT)
    resumed.join()
    assert waited.exit_code == 0, waited.output
    assert "waiting for a worker: none takes requests (worker-0 DRAINING)" in waited.stderr
    assert back in waited.stderr
    assert "no answer" not in waited.stderr
    assert "waiting for a worker" not in run(generate, PROMPT).stderr
    assert document(f"drain worker-0 {router} --force") == {"worker": "worker-0", "moved": 0}
    assert document(f"resume worker-0 {router}") == {"worker": "worker-0", "resumed": True}


def test_without_a_token_a_command_says_how_to_show_one_and_an_error_names_its_request(
    cluster: Processes, router: str
) -> None:
    told = refusal(f"workers --router {cluster.routers['router-1'].address}", code=1)
    assert "set BLOCKYARD_TOKEN, or give --token-file" in told
    # Whether an expression can be followed the worker finds out, once the router has taken the request in.
    refused = refusal(f"generate x --request-id mine-1 --regex (?=a)b {router}", code=1)
    assert "(request mine-1)" in refused


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


def test_once_shows_what_a_real_worker_did_between_two_looks(cluster: Processes, router: str) -> None:
    with generating(cluster.routers["router-0"].address):
        shown = document(f"top --once {router}")
    (row,) = shown["workers"]
    assert row["state"] == "READY"
    assert shown["generated_tokens_per_second"] == row["generated_tokens_per_second"] > 0


def test_in_a_pipe_it_shows_one_plain_screen_and_ends(router: str) -> None:
    shown = run(f"top --interval 0.2 {router}")
    assert shown.exit_code == 0, shown.output
    assert "worker-0" in shown.stdout
    assert "tokens/s" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_documents_end_with_the_pipe_that_they_go_to(router: str) -> None:
    with blockyard(*f"top --interval 0.2 --output json {router}".split()) as top:
        try:
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
        command = [sys.executable, "-m", "blockyard.deploy.cli", "top", "--interval", "0.2", *arguments]
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
def terminal(home: Path, router: str) -> Iterator[Terminal]:
    opened = Terminal(*router.split())
    opened.read_until("worker-0")
    yield opened
    opened.close()


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_on_a_terminal_it_lives_until_a_key_ends_it(terminal: Terminal, key: str) -> None:
    terminal.read_until("tokens/s")
    terminal.press(key)
    assert terminal.code() == 0
    assert "Traceback" not in terminal.text
    assert "\x1b[?1049l" in terminal.text, "the terminal is given back as it was"


def test_a_router_that_dies_meanwhile_is_said_and_found_again(cluster: Processes, terminal: Terminal) -> None:
    router = cluster.routers["router-0"]
    router.kill()
    terminal.read_until("no router answers")
    cluster.start(router)
    terminal.text = ""
    terminal.read_until("READY")
    terminal.press("q")
    assert terminal.code() == 0
    assert "Traceback" not in terminal.text


def lines(cluster: Processes, name: str) -> list[dict[str, Any]]:
    process = (cluster.workers | cluster.routers)[name]
    return [json.loads(line) for line in process.log_text().splitlines() if line.startswith("{")]


def failure(cluster: Processes, **arguments: Any) -> BlockyardError:
    with (
        Client(cluster.routers["router-0"].address, timeout_seconds=30, retries=0) as client,
        pytest.raises(BlockyardError) as caught,
    ):
        client.generate(max_tokens=4, **arguments)
    return caught.value


def test_every_line_of_a_router_and_a_worker_is_json_says_who_writes_it_and_holds_no_prompt(
    cluster: Processes,
) -> None:
    for name, identity in (("worker-0", {"worker_id": "worker-0"}), ("router-0", {"router_id": "router-0"})):
        text = (cluster.workers | cluster.routers)[name].log_text()
        ours = [line for line in text.splitlines() if "blockyard." in line]
        assert ours
        assert all(line.startswith("{") for line in ours)
        assert all(line.items() >= identity.items() for line in lines(cluster, name))
        assert MARK not in text
    assert {len(line["incarnation"]) for line in lines(cluster, "worker-0")} == {16}


def test_a_failed_request_is_found_by_its_id_in_the_logs_of_router_and_worker(cluster: Processes) -> None:
    error = failure(cluster, prompt_token_ids=[1, FAULT_TOKEN, 3], request_id=REQUEST_ID)
    assert (error.reason, error.request_id) == ("ENGINE_FAILED", REQUEST_ID)
    for name, told in (("router-0", "ENGINE_FAILED"), ("worker-0", "its step failed")):
        found = [line for line in lines(cluster, name) if line.get("request_id") == REQUEST_ID]
        assert any(told in line["message"] for line in found), name
    error = failure(cluster, prompt_token_ids=[1, FAULT_TOKEN, 4])
    assert error.request_id.startswith("req-"), "the router gives an id where the client gives none"
    assert error.request_id in {line.get("request_id") for line in lines(cluster, "router-0")}
    assert failure(cluster, prompt="x", model="another").request_id == "", "it was never taken in"


async def test_a_request_alone_is_timed_with_and_without_its_prompt_in_the_cache(tmp_path: Path) -> None:
    with processes(tmp_path, with_redis=True) as cluster:
        workers = [cluster.add_worker(name, *SIMULATED) for name in ("worker-0", "worker-1")]
        router = cluster.add_router("router-0", workers=[worker.address for worker in workers])
        cluster.start(*workers, router)
        alone = await time_alone([router.address], chats_of(DEMO_GROUPS[0])[0])
    assert alone is not None
    assert 200 < alone.cached_tokens < alone.prompt_tokens
    assert min(alone.new_seconds, alone.cached_seconds) > 0
    told = LatencyAlone(new_seconds=0.064, cached_seconds=0.0144, prompt_tokens=283, cached_tokens=272)
    line = "after 64 ms with nothing cached, after 14 ms with 272 of its 283 prompt tokens cached"
    assert line in alone_line(told)


def test_following_shows_what_comes_and_new_processes_until_ctrl_c(home: Path, tmp_path: Path) -> None:
    folder = logs_of_trial(tmp_path)
    with blockyard("logs", "-f", "--cluster", "trial") as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        shown = [process.stdout.readline() for _ in range(4)]
        LogWriter(folder, "worker-1(demo)", 103).write(log_record(time.time(), "new"))
        shown.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
        watchdog.cancel()
    assert shown[4].startswith("worker-1 ")
    assert (process.returncode, rest, errors) == (0, "", "")


def test_a_reader_that_goes_away_is_no_error(home: Path, tmp_path: Path) -> None:
    folder = logs_of_trial(tmp_path)
    LogWriter(folder, "worker-2(demo)", 104).write("x" * 100 + "\n" + "y" * 1_000_000 + "\n")
    with blockyard("logs", "--cluster", "trial") as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
