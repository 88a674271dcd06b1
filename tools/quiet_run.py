"""`python -P tools/quiet_run.py LOG COMMAND ...`: runs a long command with few lines of output.

Its output goes to LOG. Every TELL_SECONDS a line shows the time and the last line of LOG, without PIPS_ASIDES.
If it fails, the end of its output is shown. The exit code is the command's. Needs only Python, since it runs
before anything is installed.
"""

import subprocess
import sys
import time
from pathlib import Path

TELL_SECONDS = 10.0
SHOWN_CHARS = 80
SHOWN_LINES = 40
PIPS_ASIDES = (
    "Attempting uninstall",
    "Found existing installation",
    "Uninstalling",
    "Successfully uninstalled",
)
"""Beginnings of pip's lines about one package. After them pip is silent for minutes while it installs the others."""
PIPS_LIST = "Installing collected packages: "


def run(log_path: Path, command: list[str], *, tell_seconds: float = TELL_SECONDS) -> int:
    """Run a command and show how far it is. Return its exit code, or 130 if Ctrl-C ended it."""
    began, since = time.monotonic(), time.time()
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while True:
                try:
                    code = process.wait(tell_seconds)
                    break
                except subprocess.TimeoutExpired:
                    words = what_it_does(log_path, num_installed(command, since))
                    print(f"[{time.monotonic() - began:4.0f} s] {words}", flush=True)
        except KeyboardInterrupt:
            # Ctrl-C goes to the whole process group, so pip ends by itself.
            process.wait()
            return 130
    if code:
        print("\n".join(lines_of(log_path)[-SHOWN_LINES:]))
        print(f"{command[0]} failed with {code}; its whole output is in {log_path}", flush=True)
    return code


def num_installed(command: list[str], since: float) -> int:
    """Return how many packages the pip of `command` has installed since a time, by the times of their folders.

    pip itself reports nothing until all are installed.
    """
    environment = Path(command[0]).parent.parent
    found = environment.glob("lib/python*/site-packages/*.dist-info")
    return sum(folder.stat().st_mtime >= since for folder in found if folder.exists())


def what_it_does(log_path: Path, num_done: int = 0) -> str:
    """Return the last line of the log, shortened for a terminal. While pip installs packages, say that `num_done` are
    there."""
    said = [line.strip() for line in lines_of(log_path)]
    shown = [line for line in said if line and not line.startswith(PIPS_ASIDES)]
    if not shown:
        return "..."
    if shown[-1].startswith(PIPS_LIST):
        names = shown[-1].removeprefix(PIPS_LIST)
        return _shortened(f"Installing packages, {num_done} of {len(names.split(', '))} are there: {names}")
    return _shortened(shown[-1])


def _shortened(line: str) -> str:
    """Shorten a line at a word, since half of a name is another name. A single longer word stays whole."""
    if len(line) <= SHOWN_CHARS:
        return line
    end = line.rfind(" ", 0, SHOWN_CHARS - len(" ..."))
    words = line[:end] if end > 0 else line.split(maxsplit=1)[0]
    return f"{words} ..."


def lines_of(log_path: Path) -> list[str]:
    """Return the lines of the log. A progress bar overwrites its line, so each of its states is one."""
    return log_path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
