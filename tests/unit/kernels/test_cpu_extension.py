"""Building and loading the C++ kernels on a machine: any failure there costs speed and nothing else.

The tests of builders that meet in one cache are in tests/nightly/kernels.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blockyard.kernels.cpu import extension as cpu_extension
from blockyard.kernels.cpu.extension import ExtensionUnavailable, build_name, load_extension
from blockyard.kernels.selection import choose_backend

from .rig import CPU

UseCompiler = Callable[[str], Path]


def served_by_torch(caplog: pytest.LogCaptureFixture) -> str:
    """Choose a backend, which is PyTorch's, and return what is logged."""
    with caplog.at_level(logging.INFO, logger="blockyard.kernels.selection"):
        assert choose_backend(CPU).name == "torch"
    return caplog.text


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CXX", "no-such-compiler", "no C++ compiler: 'no-such-compiler' is not on the PATH"),
        ("CXX", '"', "No closing quotation"),
        ("HOME", None, "home directory"),
        ("XDG_CACHE_HOME", "{a_file}", "the C++ kernels cannot be kept or loaded"),
    ],
)
def test_whatever_is_wrong_a_worker_serves_with_torch_and_is_told_why(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str | None,
    told: str,
) -> None:
    (tmp_path / "file").write_text("")
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv(name)
        monkeypatch.setattr(os, "getuid", lambda: 54321)  # of no entry in passwd
    else:
        monkeypatch.setenv(name, value.format(a_file=tmp_path / "file"))
    assert told in served_by_torch(caplog)
    with pytest.raises(ValueError, match="the cpu backend is unavailable: "):
        choose_backend(CPU, requested="cpu")


def test_a_build_that_fails_says_the_compilers_first_error(
    use_compiler: UseCompiler, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_compiler("echo a note; echo cpu.cpp:3: error: no such type >&2; exit 3")
    assert "c++ ended with 3: cpu.cpp:3: error: no such type" in served_by_torch(caplog)
    assert not [path.name for path in cache.glob("*/*") if path.name != "lock"]


def test_a_build_is_found_again_without_a_compiler(use_compiler: UseCompiler) -> None:
    runs = use_compiler("")
    load_extension()
    Path(os.environ["CXX"]).unlink()
    load_extension()
    assert runs.read_text() == "run\n"


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
    assert runs.read_text() == "run\nrun\n"


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
