"""The choice of the backend on each device, and the refused choices."""

import logging
import shutil
import subprocess
import sys

import pytest
import torch
from blockyard.kernels.selection import choose_backend

CPU = torch.device("cpu")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_cpu_gets_the_kernels_in_cpp_and_the_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="blockyard.kernels.selection"):
        assert choose_backend(CPU).name == "cpu"
    assert "kernel backend cpu on cpu: no CUDA" in caplog.text


def test_torch_is_had_for_the_asking(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="blockyard.kernels.selection"):
        assert choose_backend(CPU, requested="torch").name == "torch"
    assert "kernel backend torch on cpu: requested" in caplog.text


def test_the_kernels_in_cpp_serve_no_gpu_and_no_deterministic_mode() -> None:
    with pytest.raises(ValueError, match="cpu backend does not serve cuda"):
        choose_backend(torch.device("cuda"), requested="cpu")
    with pytest.raises(ValueError, match="torch backend on a CPU, got backend 'cpu'"):
        choose_backend(CPU, requested="cpu", deterministic=True)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs TRITON_INTERPRET=1"):
        choose_backend(CPU, requested="triton")


def test_deterministic_mode_refuses_triton_and_cuda() -> None:
    with pytest.raises(ValueError, match="torch backend on a CPU"):
        choose_backend(CPU, requested="triton", deterministic=True)
    with pytest.raises(ValueError, match="torch backend on a CPU"):
        choose_backend(torch.device("cuda"), deterministic=True)
    assert choose_backend(CPU, deterministic=True).name == "torch"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gets_triton() -> None:
    assert choose_backend(torch.device("cuda")).name == "triton"


@pytest.mark.ci
def test_a_cpu_worker_never_imports_triton() -> None:
    program = (
        "import sys, torch\n"
        "from blockyard.kernels.selection import choose_backend\n"
        "choose_backend(torch.device('cpu')); choose_backend(torch.device('cpu'), deterministic=True)\n"
        "sys.exit('triton' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
