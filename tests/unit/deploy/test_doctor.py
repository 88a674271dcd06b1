"""`doctor` names the kernels with which this machine would serve, and builds none to find out."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from blockyard.deploy.cli import main
from blockyard.kernels.cpu import extension as cpu_extension
from blockyard.kernels.selection import choose_backend
from click.testing import CliRunner

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has Triton")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder for built kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def said_of_the_backend() -> tuple[str, str]:
    findings = json.loads(CliRunner().invoke(main, ["doctor", "--output", "json"]).stdout)
    ((verdict, detail),) = ((f["verdict"], f["detail"]) for f in findings if f["subject"] == "backend")
    return verdict, detail


def test_a_machine_without_a_compiler_is_warned_that_torch_serves_and_slower(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    verdict, detail = said_of_the_backend()
    assert verdict == "warn"
    assert detail.startswith("torch (")
    assert "slower than the C++ kernels would be: no C++ compiler: 'no-such-compiler'" in detail
    assert choose_backend(CPU).name == "torch"


def test_a_compiler_is_named_and_not_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    verdict, detail = said_of_the_backend()
    assert verdict == "ok"
    assert detail.startswith("cpu (")
    assert detail.endswith(f"the C++ kernels, built by {compiler} at the first start")
    assert not (tmp_path / "ran").exists()
    assert not cache.exists()


def test_kernels_that_were_built_need_no_compiler_but_a_folder_that_nobody_else_may_write_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    folder = cpu_extension.cache_folder() / cpu_extension.build_name()
    folder.mkdir(parents=True)
    (folder / cpu_extension.LIBRARY).write_bytes(b"kernels")
    (folder / cpu_extension.DIGEST).write_text(hashlib.sha256(b"kernels").hexdigest())
    for mode, verdict, end in (
        (0o700, "ok", "the C++ kernels, built before"),
        (0o777, "warn", "others may write to"),
    ):
        folder.chmod(mode)
        said = said_of_the_backend()
        assert said[0] == verdict
        assert end in said[1]
