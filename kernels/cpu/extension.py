"""Builds the C++ kernels of the CPU backend as a shared library, once on each machine, and keeps it in the user's
cache.

Owns how the library is compiled and where it is kept. Does not own its content (native/) or how it is called
(library.py). Needs g++, or the gcc that CXX names. Needs no root, ninja or header of PyTorch. Imports no torch.

The name of a build is the hash of everything it depends on: sources, flags, libc and the machine's vector units.
Machines that differ may share a home. The builder writes a digest beside the library after it, and a library is loaded
only if the digest matches. A killed build or a full disk can leave a file on which the loader would end the process.
The builder holds a lock, so workers that start together build once.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from blockyard.kernels.cpu.library import CpuLibrary

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
LIBRARY = "kernels.so"
DIGEST = "kernels.sha256"
# No -ffast-math: it assumes that there is no NaN, and at link time it would flush denormals of the whole process.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
BUILD_SECONDS = 180.0
WAIT_SECONDS = BUILD_SECONDS
POLL_SECONDS = 0.1
ERROR_CHARACTERS = 300


class ExtensionUnavailable(RuntimeError):
    """Says in a sentence why the C++ kernels are unavailable on this machine."""


def load_extension() -> CpuLibrary:
    """Return the library, and build it first if needed, which takes some seconds. Raises ExtensionUnavailable."""
    with _mapped_errors():
        folder = _own_folder(cache_folder() / build_name())
        if not _is_whole(folder):
            with _lock(folder) as held:
                if not _is_whole(folder):
                    _build(folder, alone=held)
        return CpuLibrary(ctypes.CDLL(str(folder / LIBRARY)))


def prospect() -> str:
    """Return in a few words how `load_extension` would get the library, without building or writing anything. Raises
    ExtensionUnavailable if it would clearly fail."""
    with _mapped_errors():
        folder = cache_folder() / build_name()
        if folder.exists() and _is_whole(_own_folder(folder)):
            return "built before"
        return f"built by {_found_compiler()[0]} at the first start"


def is_being_built() -> bool:
    """Return whether a process of this user builds the library on this machine now. Builds and writes nothing."""
    try:
        with (cache_folder() / build_name() / "lock").open() as file:
            return not _try_lock(file)
    except (OSError, RuntimeError, ValueError):
        return False  # no build has begun, or none can


@contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExtensionUnavailable(f"the C++ kernels cannot be kept or loaded: {error}") from error
    except (AttributeError, RuntimeError, ValueError) as error:
        # No home, a CXX that is no command, or a library without our functions. Workers serve without it.
        raise ExtensionUnavailable(str(error)) from error


def cache_folder() -> Path:
    """Return the folder for builds in this user's cache, by the XDG rules."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "blockyard" / "kernels"


def build_name() -> str:
    """Return the name of a build: a hash of sources, compiler, flags, libc and this machine's vector units."""
    digest = hashlib.sha256()
    for part in (*_compiler(), *FLAGS, platform.machine(), *platform.libc_ver(), _vector_units()):
        digest.update(f"{len(part)} {part}\0".encode())
    for source in _sources():
        digest.update(f"{source.name}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _found_compiler() -> list[str]:
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        raise ExtensionUnavailable(f"no C++ compiler: {compiler[0]!r} is not on the PATH")
    return compiler


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _vector_units() -> str:
    """Return the CPU's model and features, from which -march=native follows."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _own_folder(folder: Path) -> Path:
    """Create a folder, and check that only this user can write to it or replace it, because its content is executed.
    Raises ExtensionUnavailable."""
    base = folder.parents[2]
    base.mkdir(parents=True, exist_ok=True)
    for level in (*reversed(folder.parents[:2]), folder):
        level.mkdir(mode=0o700, exist_ok=True)
        status = level.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            raise ExtensionUnavailable(f"others may write to {level}, so nothing is loaded from it")
    status = base.stat()
    if status.st_uid not in (os.getuid(), 0) or (
        status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX
    ):
        raise ExtensionUnavailable(f"any user may write to {base}, so nothing is loaded from it")
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / DIGEST).read_text(encoding="ascii") == _digest(folder / LIBRARY)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Hold the build lock, and yield whether it was obtained. The system releases it when its holder dies. The wait
    ends after the longest build: then two processes build side by side, each in a folder of its own."""
    deadline = time.monotonic() + WAIT_SECONDS
    with (folder / "lock").open("w") as file:
        while not (held := _try_lock(file)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        yield held


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _build(folder: Path, *, alone: bool) -> None:
    compiler = _found_compiler()
    if alone:
        for abandoned in folder.glob("build-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
    logger.info("building the CPU kernels with %s: some seconds, once", compiler[0])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder, ignore_cleanup_errors=True) as work:
        built, digest = Path(work) / LIBRARY, Path(work) / DIGEST
        sources = [str(source) for source in _sources() if source.suffix == ".cpp"]
        _run([*compiler, *FLAGS, *sources, "-o", str(built)])
        digest.write_text(_digest(built), encoding="ascii")
        os.replace(built, folder / LIBRARY)
        os.replace(digest, folder / DIGEST)
    logger.info("built the CPU kernels in %.1f s", time.monotonic() - begin)


def _run(command: list[str]) -> None:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, output = process.communicate(timeout=BUILD_SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # the compiler driver's own children too
            if isinstance(error, subprocess.TimeoutExpired):
                raise ExtensionUnavailable(f"{command[0]} took longer than {BUILD_SECONDS:g} s") from None
            raise
    if process.returncode:
        errors = [line for line in output.splitlines() if "error" in line] or [output.strip()]
        raise ExtensionUnavailable(
            f"{command[0]} ended with {process.returncode}: {errors[0][:ERROR_CHARACTERS]}"
        )
