"""Building and loading the C++ kernels on a machine: any failure there costs speed and nothing else."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.kernels.cpu import extension as cpu_extension
from blockyard.kernels.cpu.extension import ExtensionUnavailable, build_name, load_extension
from blockyard.kernels.selection import choose_backend

CPU = torch.device("cpu")
SECONDS = 120.0
LOAD = "from blockyard.kernels.cpu.extension import load_extension; load_extension()"
UseCompiler = Callable[[str], Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cpu_extension.cache_folder()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that a compiler built quickly, without optimisation."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    library = tmp_path_factory.mktemp("built") / "kernels.so"
    sources = [str(path) for path in cpu_extension.SOURCES.glob("*.cpp")]
    command = ["g++", *cpu_extension.FLAGS, "-O0", *sources, "-o", str(library)]
    subprocess.run(command, check=True, timeout=SECONDS)
    return library


@pytest.fixture
def use_compiler(cache: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseCompiler:
    """Names a compiler that notes each run in the file returned and does what it is told before its work."""

    def use(first: str) -> Path:
        runs, script = tmp_path / "compiler.runs", tmp_path / "compiler"
        script.write_text(
            f'#!/bin/sh\necho run >> {runs}\nfor target; do :; done\n{first}\ncp {built} "$target"\n'
        )
        script.chmod(0o700)
        monkeypatch.setenv("CXX", str(script))
        return runs

    return use


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_runs(runs: Path) -> int:
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def test_a_machine_without_a_compiler_is_served_by_torch_and_told_why(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, logger="blockyard.kernels.selection"):
        assert choose_backend(CPU).name == "torch"
    assert "no C++ compiler: 'no-such-compiler' is not on the PATH" in caplog.text
    with pytest.raises(ValueError, match="the cpu backend is unavailable: no C"):
        choose_backend(CPU, requested="cpu")


def test_a_build_that_fails_says_the_compilers_first_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "sh -c 'echo a note; echo cpu.cpp:3: error: no such type >&2; exit 3'")
    with caplog.at_level(logging.INFO, logger="blockyard.kernels.selection"):
        assert choose_backend(CPU).name == "torch"
    assert "sh ended with 3: cpu.cpp:3: error: no such type" in caplog.text
    assert not [path.name for path in cache.glob("*/*") if path.name != "lock"]


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, logger="blockyard.kernels.selection"):
        assert choose_backend(CPU).name == "torch"
    assert "the C++ kernels cannot be kept or loaded" in caplog.text


@pytest.mark.ci
def test_a_build_is_found_again_without_a_compiler(
    use_compiler: UseCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = use_compiler("")
    load_extension()
    Path(os.environ["CXX"]).unlink()
    load_extension()
    assert num_runs(runs) == 1


def test_workers_that_start_together_build_once(use_compiler: UseCompiler, cache: Path) -> None:
    runs = use_compiler("sleep 1")
    workers = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(3)]
    assert [worker.wait(SECONDS) for worker in workers] == [0, 0, 0]
    assert num_runs(runs) == 1
    assert sorted(path.name for path in cache.glob("*/*")) == ["kernels.sha256", "kernels.so", "lock"]


def test_a_build_shows_from_outside_while_it_lasts(use_compiler: UseCompiler, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    use_compiler(f"until [ -e {go_on} ]; do sleep 0.05; done")
    assert not cpu_extension.is_being_built()
    worker = subprocess.Popen([sys.executable, "-c", LOAD])
    until(cpu_extension.is_being_built)
    go_on.touch()
    assert worker.wait(SECONDS) == 0
    assert not cpu_extension.is_being_built()


def test_a_killed_build_leaves_nothing_that_is_loaded_and_the_next_one_clears_up(
    use_compiler: UseCompiler, cache: Path
) -> None:
    runs = use_compiler(f'echo half > "$target"; sleep {SECONDS}')
    builder = subprocess.Popen([sys.executable, "-c", LOAD], start_new_session=True)
    try:
        until(lambda: bool(list(cache.glob("*/build-*/kernels.so"))))
    finally:
        os.killpg(builder.pid, signal.SIGKILL)
        builder.wait(SECONDS)
    assert not list(cache.glob("*/kernels.so"))
    use_compiler("")
    load_extension()
    assert num_runs(runs) == 2
    assert sorted(path.name for path in cache.glob("*/*")) == ["kernels.sha256", "kernels.so", "lock"]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_library_that_was_cut_off_is_not_loaded_but_built_again(
    use_compiler: UseCompiler, cache: Path, share: float
) -> None:
    """The loader would end the process by SIGBUS, where a full disk or a lost write left half of it."""
    runs = use_compiler("")
    load_extension()
    library = cache / build_name() / cpu_extension.LIBRARY
    whole = library.read_bytes()
    library.unlink()  # it is mapped into this process
    library.write_bytes(whole[: int(share * len(whole))])
    load_extension()
    assert library.read_bytes() == whole
    assert num_runs(runs) == 2


def test_who_has_waited_too_long_builds_beside_the_other_and_both_have_kernels(
    use_compiler: UseCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = use_compiler("[ $(wc -l < $0.runs) -gt 1 ] || until [ -e $0.go ]; do sleep 0.1; done")
    other = subprocess.Popen([sys.executable, "-c", LOAD])
    until(lambda: num_runs(runs) == 1)
    monkeypatch.setattr(cpu_extension, "WAIT_SECONDS", 0.0)
    load_extension()
    assert other.poll() is None, "the other one still builds"
    runs.with_name("compiler.go").touch()
    assert other.wait(SECONDS) == 0
    assert num_runs(runs) == 2


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CXX", '"', "No closing quotation"),
        ("HOME", None, "home directory"),
        pytest.param("FLAGS", ("-Dby_attend=other",), "by_attend", marks=pytest.mark.slow),  # compiles all
    ],
)
def test_whatever_is_wrong_a_worker_serves_with_torch(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: Any,
    told: str,
) -> None:
    if name == "FLAGS":
        monkeypatch.setattr(cpu_extension, name, (*cpu_extension.FLAGS, *value))
    elif value is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv(name)
        monkeypatch.setattr(os, "getuid", lambda: 54321)  # of no entry in passwd
    else:
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, logger="blockyard.kernels.selection"):
        assert choose_backend(CPU).name == "torch"
    assert told in caplog.text


@pytest.mark.parametrize("which", ["its own", "one above"])
def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(
    use_compiler: UseCompiler, cache: Path, which: str
) -> None:
    use_compiler("")
    folder = cache / build_name()
    folder.mkdir(parents=True)
    (folder if which == "its own" else cache).chmod(0o777)
    with pytest.raises(ExtensionUnavailable, match="others may write"):
        load_extension()


def test_other_vector_units_sources_or_flags_make_another_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [build_name()]
    shutil.copytree(cpu_extension.SOURCES, tmp_path / "native")
    with (tmp_path / "native" / "lanes.h").open("a") as header:
        header.write("// another\n")
    for name, value in (
        ("SOURCES", tmp_path / "native"),
        ("FLAGS", ("-O1",)),
        ("_vector_units", lambda: "flags: avx9"),
    ):
        monkeypatch.setattr(cpu_extension, name, value)
        names.append(build_name())
    assert len(set(names)) == 4
