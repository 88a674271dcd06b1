"""`python -P tools/quietly.py LOG COMMAND ...`: runs a long, talkative command in few lines.

Its output goes to LOG. While it runs, a line each TELL_SECONDS says how long it has and what it does by its own last
words, without those of pip that say what is over while all the rest is being installed; where it fails, the end of its
output is shown, and its exit code is ours. Needs nothing but Python, for it runs before anything is installed.
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
"""Said of one package after "Installing collected packages", and then nothing more for minutes."""
PIPS_LIST = "Installing collected packages: "


def run(log_path: Path, command: list[str], *, tell_seconds: float = TELL_SECONDS) -> int:
    """Its exit code; 130 where Ctrl-C ended it."""
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
            # It was sent to the whole group: pip ends by itself.
            process.wait()
            return 130
    if code:
        print("\n".join(lines_of(log_path)[-SHOWN_LINES:]))
        print(f"{command[0]} failed with {code}; all that it said is in {log_path}", flush=True)
    return code


def num_installed(command: list[str], since: float) -> int:
    """Counts the packages that came since then, by the clock of files, to such a pip's environment. It says nothing of
    them itself until all are there."""
    environment = Path(command[0]).parent.parent
    found = environment.glob("lib/python*/site-packages/*.dist-info")
    return sum(folder.stat().st_mtime >= since for folder in found if folder.exists())


def what_it_does(log_path: Path, num_done: int = 0) -> str:
    """Short enough for a line of a terminal. Of what is being installed `num_done` are there."""
    said = [line.strip() for line in lines_of(log_path)]
    told = [line for line in said if line and not line.startswith(PIPS_ASIDES)]
    if not told:
        return "..."
    if told[-1].startswith(PIPS_LIST):
        names = told[-1].removeprefix(PIPS_LIST)
        return _shortened(f"Installing packages, {num_done} of {len(names.split(', '))} are there: {names}")
    return _shortened(told[-1])


def _shortened(line: str) -> str:
    """Whole words only: half of a name is another name. One that is longer than the line stays."""
    if len(line) <= SHOWN_CHARS:
        return line
    end = line.rfind(" ", 0, SHOWN_CHARS - len(" ..."))
    words = line[:end] if end > 0 else line.split(maxsplit=1)[0]
    return f"{words} ..."


def lines_of(log_path: Path) -> list[str]:
    """A progress bar writes over its own line."""
    return log_path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
