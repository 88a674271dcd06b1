"""Runs the tests of a benchmark's subject before it measures. A failure ends the benchmark.

A red test means no figures. Each benchmark chooses its tests.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


class RedTests(Exception):
    """A test failed. The message contains pytest's output."""


def prove(tests: Sequence[str]) -> str:
    """Run tests and return a line for the report with the number that passed. `tests` are pytest's arguments.

    Raise RedTests if one fails or none ran.
    """
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
