"""The choice of the backend on each device, and the refused choices."""

import logging
import shutil
from typing import Any

import pytest
import torch
from blockyard.kernels.selection import choose_backend

from .rig import CPU

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("options", "name", "why"),
    [
        pytest.param(
            {}, "cpu", "no CUDA", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
        ),
        ({"requested": "torch"}, "torch", "requested"),
        ({"deterministic": True}, "torch", ""),
    ],
)
def test_a_backend_of_a_cpu_is_chosen_and_the_reason_is_logged(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], name: str, why: str
) -> None:
    with caplog.at_level(logging.INFO, logger="blockyard.kernels.selection"):
        assert choose_backend(CPU, **options).name == name
    assert f"kernel backend {name} on cpu: {why}" in caplog.text


@pytest.mark.parametrize(
    ("device", "options", "told"),
    [
        (CUDA, {"requested": "cpu"}, "cpu backend does not serve cuda"),
        (CPU, {"requested": "cpu", "deterministic": True}, "torch backend on a CPU, got backend 'cpu'"),
        (CPU, {"requested": "triton"}, "needs TRITON_INTERPRET=1"),
        (CPU, {"requested": "triton", "deterministic": True}, "torch backend on a CPU"),
        (CUDA, {"deterministic": True}, "torch backend on a CPU"),
    ],
)
def test_a_backend_that_does_not_serve_the_device_or_mode_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, options: dict[str, Any], told: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=told):
        choose_backend(device, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gets_triton() -> None:
    assert choose_backend(CUDA).name == "triton"
