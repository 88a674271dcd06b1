"""Being told to end, in the moments when Python loses the exception."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from blockyard.deploy.interruption import end_like_ctrl_c, raise_if_asked

class Lost:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):
            pass

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


def test_a_reader_that_has_gone_ends_no_start_and_no_end() -> None:
    code = (
        "import sys\n"
        "from blockyard.deploy.progress import StageProgress\n"
        "from blockyard.deploy.serving import Progress\n"
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
    )
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    told, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, told) == (0, "to the end\n")
