"""`python -m tests.nightly.faults.mutants [ROW ...] [--report FILE]`: checks that tests of the fault matrix can fail.

For each mutant of mutant_table.py it copies the tree, breaks the copy in that one way, and runs the row's tests there.
They must fail. The checkout itself is never touched. Exits with 1 if a mutant survived, or if its tests reached no
verdict.

Owns the copy, the runs and the report. Does not own the list of mutants.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .mutant import Mutant
from .mutant_table import MUTANTS, NOT_TRIED
from .report import day_and_commit, rewritten

ROOT = Path(__file__).parents[3]
TEST_SECONDS = 200
MUTANT_SECONDS = 900.0
HEAD = (
    "| n | the product, broken on purpose | told by | verdict | seconds | tried | how it shows |",
    "|---|---|---|---|---|---|---|",
)
MAX_SHOWN = 110
_SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED) \S.*?(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    mutant: Mutant
    word: str
    """"killed", "survived", or the reason why there is no verdict."""
    seconds: float
    tried: str = ""
    """Day and commit. Each row of a kept table may have its own."""
    shown: str = ""
    """The first line of the failure that killed it."""

    @property
    def is_killed(self) -> bool:
        return self.word == "killed"

    def line(self) -> str:
        tests = "<br>".join(f"`{test.rpartition('/')[2]}`" for test in self.mutant.tests)
        cells = (
            str(self.mutant.row),
            self.mutant.name,
            tests,
            self.word if self.is_killed else f"**{self.word}**",
            f"{self.seconds:.0f}",
            self.tried,
            self.shown.replace("|", "\\|"),
        )
        return f"| {' | '.join(cells)} |"


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield a copy of the checkout's files as they are now, which Python can import by the product's name."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    folder = Path(tempfile.mkdtemp(prefix="blockyard-mutant-"))
    try:
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / ".typing").mkdir()
        (folder / ".typing" / "blockyard").symlink_to("..")
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def broken(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Apply this mutant to the tree for the context. Raises ValueError if it no longer fits the product."""
    files = [(edit, edit.file(tree)) for edit in mutant.edits]
    sound = {file: file.read_text() for _, file in files}
    try:
        for edit, file in files:
            file.write_text(edit.apply(file.read_text()))
        yield
    finally:
        for file, text in sound.items():
            file.write_text(text)


def judged(tree: Path, mutant: Mutant) -> Verdict:
    began = time.monotonic()
    with broken(tree, mutant):
        output = _output(tree, mutant.tests)
    word, shown = verdict_of(output)
    seconds = time.monotonic() - began
    return Verdict(mutant=mutant, word=word, shown=shown, seconds=seconds, tried=day_and_commit())


def verdict_of(output: str) -> tuple[str, str]:
    """Return the verdict from pytest's output. A cluster that does not even start proves nothing about a test."""
    outcomes = [(found[1], found[2] or "") for found in _SUMMARY.finditer(output)]
    words = {word for word, _ in outcomes}
    if "FAILED" in words:
        shown = next(text for word, text in outcomes if word == "FAILED")
        return "killed", shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
    if "ERROR" in words or not outcomes:
        return "did not come to its test", next((text for word, text in outcomes if word == "ERROR"), "")
    return ("survived" if "PASSED" in words else "skipped by its test"), ""


def _output(tree: Path, tests: Sequence[str]) -> str:
    path = f"{tree / '.typing'}:{tree}"
    # Python trusts bytecode by size and second, so it could take the previous mutant's bytecode for this one's.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    command = [sys.executable, "-m", "pytest", *tests, "-m", "", "-x", "-rA", "--timeout", str(TEST_SECONDS)]
    command += ["-p", "no:cacheprovider", "--basetemp", str(tree / ".scratch")]
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=MUTANT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    return output


def table(verdicts: Iterable[Verdict], before: str = "") -> list[str]:
    """Return the table, with the earlier table's lines for the mutants that did not run now."""
    lines = {_key(line): line for line in before.splitlines() if re.match(r"\| \d+ \|", line)}
    lines |= {(verdict.mutant.row, verdict.mutant.name): verdict.line() for verdict in verdicts}
    known = [(mutant.row, mutant.name) for mutant in MUTANTS]
    untried = [f"| {row} | - | - | not tried | - | - | {reason} |" for row, reason in NOT_TRIED.items()]
    tried = [lines[key] for key in known if key in lines]
    return [*HEAD, *sorted([*tried, *untried], key=lambda line: _key(line)[0])]


def _key(line: str) -> tuple[int, str]:
    _, row, name, *_ = (cell.strip() for cell in line.split("|"))
    return int(row), name


def chosen(rows: Sequence[int]) -> list[Mutant]:
    """Return the mutants of these rows, or all if no row is named. Raises ValueError for an unknown row."""
    known: Mapping[int, object] = {mutant.row: mutant for mutant in MUTANTS}
    if unknown := [str(row) for row in rows if row not in known]:
        raise ValueError(f"no mutant is written down for row {', '.join(unknown)}")
    return [mutant for mutant in MUTANTS if not rows or mutant.row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.faults.mutants", description=__doc__)
    parser.add_argument(
        "rows", nargs="*", type=int, metavar="ROW", help="of the fault matrix; all by default"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="rewrite these rows of the table there")
    arguments = parser.parse_args()
    try:
        wanted = chosen(arguments.rows)
    except ValueError as error:
        parser.error(str(error))
    verdicts = []
    with copied_tree() as tree:
        for mutant in wanted:
            verdict = judged(tree, mutant)
            verdicts.append(verdict)
            print(f"{mutant.row:3} {verdict.word:9} {verdict.seconds:5.0f} s  {mutant.name}", flush=True)
            print(f"    {verdict.shown}", flush=True)
            if arguments.report is not None:
                text = arguments.report.read_text()
                lines = table(verdicts, before=text)
                arguments.report.write_text(rewritten(text, lines, by="the mutants"))
    return 0 if all(verdict.is_killed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
