"""Workers that build the C++ kernels at once, wait for each other, or are killed amid a build."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blockyard.kernels.cpu import extension as cpu_extension
from blockyard.kernels.cpu.extension import ExtensionUnavailable, load_extension

SECONDS = 120.0
LOAD = "from blockyard.kernels.cpu.extension import load_extension; load_extension()"
COMPLETE = ["kernels.sha256", "kernels.so", "lock"]
UseCompiler = Callable[[str], Path]


def loading(**options: bool) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", LOAD], **options)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_runs(runs: Path) -> int:
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def test_workers_that_start_together_build_once(use_compiler: UseCompiler, cache: Path) -> None:
    runs = use_compiler("sleep 1")
    workers = [loading() for _ in range(3)]
    assert [worker.wait(SECONDS) for worker in workers] == [0, 0, 0]
    assert num_runs(runs) == 1
    assert sorted(path.name for path in cache.glob("*/*")) == COMPLETE


def test_a_build_shows_from_outside_while_it_lasts(use_compiler: UseCompiler, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    use_compiler(f"until [ -e {go_on} ]; do sleep 0.05; done")
    assert not cpu_extension.is_being_built()
    worker = loading()
    until(cpu_extension.is_being_built)
    go_on.touch()
    assert worker.wait(SECONDS) == 0
    assert not cpu_extension.is_being_built()


def test_a_killed_build_leaves_nothing_that_is_loaded_and_the_next_one_clears_up(
    use_compiler: UseCompiler, cache: Path
) -> None:
    runs = use_compiler(f'echo half > "$target"; sleep {SECONDS}')
    builder = loading(start_new_session=True)
    try:
        until(lambda: bool(list(cache.glob("*/build-*/kernels.so"))))
    finally:
        os.killpg(builder.pid, signal.SIGKILL)
        builder.wait(SECONDS)
    assert not list(cache.glob("*/kernels.so"))
    use_compiler("")
    load_extension()
    assert num_runs(runs) == 2
    assert sorted(path.name for path in cache.glob("*/*")) == COMPLETE


def test_who_has_waited_too_long_builds_beside_the_other_and_both_have_kernels(
    use_compiler: UseCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go-on"
    runs = use_compiler(
        f"[ $(wc -l < {tmp_path}/compiler.runs) -gt 1 ] || until [ -e {go_on} ]; do sleep 0.1; done"
    )
    other = loading()
    until(lambda: num_runs(runs) == 1)
    monkeypatch.setattr(cpu_extension, "WAIT_SECONDS", 0.0)
    load_extension()
    assert other.poll() is None, "the other one still builds"
    go_on.touch()
    assert other.wait(SECONDS) == 0
    assert num_runs(runs) == 2


def test_a_library_without_a_function_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sources are compiled."""
    monkeypatch.setattr(cpu_extension, "FLAGS", (*cpu_extension.FLAGS, "-Dby_attend=other"))
    with pytest.raises(ExtensionUnavailable, match="by_attend"):
        load_extension()
