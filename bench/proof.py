"""No figure on a red test: what a benchmark measures is tested right before, and a failure ends it.

Owns running the tests. Which ones prove a benchmark's subject is said by the benchmark.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


class RedTests(Exception):
    """The tests' own words are in the message."""


def prove(tests: Sequence[str]) -> str:
    """How many passed, in a word for the report. Raises RedTests where one fails, or none ran. `tests` are pytest's
    arguments."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.strip().rpartition("\n")[2]
    passed = re.search(r"(\d+) passed", last)
    if done.returncode or passed is None:
        raise RedTests(f"no benchmark on a red test:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    skipped = re.search(r"(\d+) skipped", last)
    return (
        f"{passed[1]} tests passed{f', {skipped[1]} were skipped' if skipped else ''} ({shlex.join(tests)})"
    )
