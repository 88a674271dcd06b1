"""A signal to end that comes at a moment when Python loses the exception."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
from blockyard.deploy.machine.interruption import end_like_ctrl_c, raise_if_asked

class Lost:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):
            pass

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
end_like_ctrl_c()
raise_if_asked()
Lost()
print("went on", flush=True)
raise_if_asked()
print("never", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_within_a_librarys_callback_is_not_lost(number: signal.Signals) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(int(number))], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "went on\n"
    assert result.returncode == -signal.SIGINT
    assert "Exception ignored" in result.stderr


UNDOING = """
import os, pathlib, signal, sys, time
from blockyard.deploy.machine.interruption import end_like_ctrl_c
from blockyard.deploy.lifecycle.progress import StageProgress
from blockyard.deploy.lifecycle.serving import Progress

signal.signal(signal.SIGHUP, signal.SIG_DFL)
end_like_ctrl_c()
try:
    print("serves", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
    with StageProgress() as progress:
        progress.report(Progress(stage="saying goodbye"))
        time.sleep(0.5)
        progress.report(Progress(stage="stopping processes"))
    print("down", file=sys.stderr, flush=True)
    pathlib.Path(sys.argv[1]).touch()
"""


def test_a_terminal_that_closes_and_a_second_signal_end_no_undoing(tmp_path: Path) -> None:
    done = tmp_path / "done"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", UNDOING, str(done)])
    told = b""
    while b"serves" not in told:
        told += os.read(terminal, 1024)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert (done.exists(), os.waitstatus_to_exitcode(status)) == (True, 0)


def test_nohup_keeps_its_word() -> None:
    code = (
        "import os, signal\n"
        "from blockyard.deploy.machine.interruption import end_like_ctrl_c\n"
        "end_like_ctrl_c()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('goes on')\n"
    )
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert (result.returncode, result.stdout) == (0, "goes on\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_ends_no_start_and_no_end(unbuffered: str) -> None:
    code = (
        "import sys\n"
        "from blockyard.deploy.lifecycle.progress import StageProgress\n"
        "from blockyard.deploy.lifecycle.serving import Progress\n"
        "sys.stdin.readline()\n"
        "with StageProgress() as progress:\n"
        "    for number in range(3):\n"
        "        progress.report(Progress(stage=str(number), warning='unread'))\n"
        "print('to the end')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    told, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, told) == (0, "to the end\n")
