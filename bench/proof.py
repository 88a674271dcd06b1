"""Runs the tests of a benchmark's subject before it measures.

Each benchmark chooses its tests. For some, a red test ends the benchmark (`prove`). Others measure in any case, and
their report is marked UNPROVEN (`Proof`).
"""

import os
import re
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_PROCESSES = 12
"""Maximum processes of tests that share a GPU. Each takes half a gigabyte of it before its first tensor."""
MAX_FAILURES = 20
"""Number of failures after which a proof ends: a report says that it is unproven, and not how much."""


class RedTests(Exception):
    """A test failed, none ran, or the tests took too long. The message contains pytest's output."""

    def __init__(self, summary: str, output: str = "") -> None:
        super().__init__(f"no benchmark on a red test: {summary}\n{output}".strip())
        self.summary = summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Words of a report on the tests before it."""

    proven: str
    """The tests that passed."""
    unproven: str = ""
    """Why figures prove nothing, in words, or "" if all tests passed."""


def prove(tests: Sequence[str], *, device: str = "cpu", seconds: float | None = None) -> str:
    """Run tests and return a line for the report with the number that passed. `tests` are pytest's arguments.

    Raise RedTests if one fails, none ran, or they take longer than `seconds`.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--maxfail={MAX_FAILURES}"]
    command += [*_processes(device), *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RedTests(f"not all tests ended within {seconds:.0f} s") from None
    last = done.stdout.strip().rpartition("\n")[2]
    passed = re.search(r"(\d+) passed", last)
    if done.returncode or passed is None:
        raise RedTests(last.strip("= ") or "no test ran", f"{done.stdout[-3000:]}{done.stderr[-1000:]}")
    skipped = re.search(r"(\d+) skipped", last)
    return (
        f"{passed[1]} tests passed{f', {skipped[1]} were skipped' if skipped else ''} ({shlex.join(tests)})"
    )


def _processes(device: str) -> list[str]:
    """Return pytest's arguments for several processes. On a CPU there is one, which computes on all cores."""
    if device == "cpu" or find_spec("xdist") is None:
        return []
    return ["-n", str(min(MAX_PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"]


def add_proof_options(parser: ArgumentParser, *, default: Sequence[str], about: str) -> None:
    parser.add_argument("--prove", nargs="*", default=default, help=about)
    parser.add_argument(
        "--proof-seconds", type=float, default=inf, help="tests that take longer leave the report unproven"
    )
    parser.add_argument("--skip-proof", action="store_true", help="run no tests; the report is unproven")


def proof_of(runs: Sequence[Sequence[str]], *, device: str, is_skipped: bool, seconds: float = inf) -> Proof:
    """Run tests in one or more runs of pytest, and return what a report says of them. Print the output of a red run.

    If `is_skipped`, none runs. Tests that take longer than `seconds` together are red.
    """
    if is_skipped:
        return Proof(proven="nothing", unproven="measured without tests (--skip-proof)")
    ends = time.monotonic() + seconds
    passed: list[str] = []
    for tests in runs:
        left = max(0.0, ends - time.monotonic())
        try:
            passed.append(prove(tests, device=device, seconds=None if left == inf else left))
        except RedTests as red:
            print(red, flush=True)
            unproven = f"{red.summary} ({shlex.join(tests)})"
            return Proof(proven="; ".join(passed) or "nothing", unproven=unproven)
    return Proof(proven="; ".join(passed))


def end_if_unproven(proof: Proof, *, is_skipped: bool) -> None:
    """Raise SystemExit for a red test, after its report is written. Who leaves tests out knows it."""
    if proof.unproven and not is_skipped:
        raise SystemExit(f"the report is UNPROVEN: {proof.unproven}")
