"""The backends of the kernel tests, and which files a machine without hypothesis leaves out.

With CUDA the tests run natively, otherwise under Triton's interpreter, which tests/conftest.py chooses.
"""

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blockyard.kernels.cpu import extension as cpu_extension
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.extension import ExtensionUnavailable, load_extension
from blockyard.kernels.interface import Backend
from blockyard.kernels.selection import choose_backend

from .rig import DEVICE, OnPlainPools

HAS_HYPOTHESIS = importlib.util.find_spec("hypothesis") is not None
# `make gpu-check` runs on machines that have none; these are about CPUs or plain arithmetic.
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if not HAS_HYPOTHESIS and re.search(r"^(from|import) hypothesis", path.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="session")
def backend_of(request: pytest.FixtureRequest) -> Callable[[str], Backend]:
    def backend(name: str) -> Backend:
        if name == "cpu":
            return request.getfixturevalue("cpu_backend")  # type: ignore[no-any-return]
        return choose_backend(DEVICE, requested=name)

    return backend


@pytest.fixture(scope="session", params=["triton", "torch", "cpu"])
def backend(request: pytest.FixtureRequest, backend_of: Callable[[str], Backend]) -> Backend:
    return backend_of(request.param)


@pytest.fixture(scope="session")
def cpu_backend() -> CpuBackend:
    if DEVICE.type != "cpu":
        pytest.skip("the CPU backend serves no CUDA tensors")
    try:
        return OnPlainPools(load_extension())
    except ExtensionUnavailable as error:
        if shutil.which("g++"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def triton_backend() -> Backend:
    return choose_backend(DEVICE, requested="triton")


@pytest.fixture(scope="session")
def built(cpu_backend: CpuBackend) -> Path:
    """Return the library of the kernels that `load_extension` has built."""
    return cpu_extension.cache_folder() / cpu_extension.build_name() / cpu_extension.LIBRARY


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cpu_extension.cache_folder()


@pytest.fixture
def use_compiler(
    built: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Name a compiler that notes each run in the file returned and does what it is told before its work."""

    def use(first: str) -> Path:
        runs, script = tmp_path / "compiler.runs", tmp_path / "c++"
        script.write_text(
            f'#!/bin/sh\necho run >> {runs}\nfor target; do :; done\n{first}\ncp {built} "$target"\n'
        )
        script.chmod(0o700)
        monkeypatch.setenv("CXX", str(script))
        return runs

    return use
