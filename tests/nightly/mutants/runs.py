"""Run tests on copies of a tree, several at a time, each run in a process forked from this one.

The fork has the large libraries already, so a run begins within a second. Owns the copies and the processes.
"""

import builtins
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = (
    "torch numpy grpc google.protobuf.message hypothesis redis aiohttp prometheus_client cryptography.x509"
)
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "120")
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Tests to run on a tree in which some files are others."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    """Kill the run after this time."""
    texts: dict[Path, bytes]
    row: int | None = None
    """Run tests of this row of the fault matrix only."""


class Recorder:
    """A pytest plugin that notes what each test reached, how long it took, and what failed."""

    def __init__(self, row: int | None) -> None:
        self.row = row
        self.num_passed = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.reached: dict[str, set[str]] = defaultdict(set)
        """Functions by test, and by file for what its fixtures reached: they may serve other tests of the file too."""
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.row is not None:
            items[:] = [i for i in items if any(mark.args[0] == self.row for mark in i.iter_markers("fault"))]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        setattr(builtins, "blockyard_reached", self.reached[item.nodeid.partition("::")[0]].add)  # noqa: B010
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        setattr(builtins, "blockyard_reached", self.reached[item.nodeid].add)  # noqa: B010
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        self.num_passed += report.when == "call" and report.passed
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def answer(self) -> Answer:
        reached = {test: sorted(names) for test, names in self.reached.items()}
        return vars(self) | {"reached": reached}


@contextmanager
def copied_trees(root: Path, count: int) -> Iterator[list[Path]]:
    """Yield copies of a checkout's files as they are now, which Python can import by the product's name."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="blockyard-mutants-", ignore_cleanup_errors=True) as folder:
        trees = [Path(folder) / str(number) for number in range(count)]
        for tree in trees:
            for name in filter(None, names):
                if (root / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / name, tree / name)
            (tree / ".typing").mkdir()
            (tree / ".typing" / "blockyard").symlink_to("..")
        yield trees


@contextmanager
def rewritten(texts: dict[Path, bytes]) -> Iterator[None]:
    """Give these files other contents for the context."""
    sound = {path: (path.read_bytes(), path.stat().st_mtime) for path in texts}
    try:
        for path, text in texts.items():
            path.write_bytes(text)
            # Python trusts bytecode by size and second, so it could take the sound module's for this one's.
            os.utime(path, times=(time.time(), sound[path][1] + 1 + time.monotonic_ns() % 10**8))
        yield
    finally:
        for path, (text, modified) in sound.items():
            path.write_bytes(text)
            os.utime(path, times=(time.time(), modified))


def answers(jobs: Iterable[Job], trees: list[Path], *options: str) -> Iterator[tuple[Job, Answer]]:
    """Run the jobs, one at a time on each tree, and yield them as they end. A job without an answer hung or died."""
    for library in LIBRARIES.split():
        with suppress(ImportError):
            importlib.import_module(library)
    waiting, free = iter(jobs), list(trees)
    running: dict[int, tuple[Job, Path, ExitStack, float]] = {}
    try:
        while True:
            while free and (job := next(waiting, None)) is not None:
                tree, change = free.pop(), ExitStack()
                change.enter_context(rewritten({tree / path: text for path, text in job.texts.items()}))
                running[_forked(tree, job, options)] = (job, tree, change, time.monotonic() + job.seconds)
            if not running:
                return
            time.sleep(0.02)
            for pid, (job, tree, change, deadline) in tuple(running.items()):
                is_late = time.monotonic() > deadline
                if is_late or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    _end(pid)
                    del running[pid]
                    change.close()
                    free.append(tree)
                    file, log = tree / "answer.json", tree / "log.txt"
                    is_there = file.exists() and not is_late
                    yield job, json.loads(file.read_text()) if is_there else {"log": log.read_text()[-2000:]}
    finally:
        for pid, (_, _, change, _) in running.items():
            _end(pid)
            change.close()


def _end(pid: int) -> None:
    """Kill a run, and what its tests left behind."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _forked(tree: Path, job: Job, options: tuple[str, ...]) -> int:
    (tree / "answer.json").unlink(missing_ok=True)
    sys.stdout.flush()
    if pid := os.fork():
        with suppress(PermissionError):
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        os.chdir(tree)
        log = os.open(tree / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "blockyard")]:
            del sys.modules[name]
        path = [str(tree / ".typing"), str(tree)]
        sys.path[:] = [*path, *sys.path[1:]]
        # Random examples are the same for each mutant.
        os.environ.update(CI="1", PYTHONPATH=":".join(path))
        importlib.invalidate_caches()
        recorder = Recorder(job.row)
        scratch = str(tree / ".scratch")
        pytest.main([*OPTIONS, "--basetemp", scratch, *job.arguments, *options], plugins=[recorder])
        (tree / "answer.part").write_text(json.dumps(recorder.answer()))
        (tree / "answer.part").rename(tree / "answer.json")
    finally:
        os._exit(0)
