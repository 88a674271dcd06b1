"""Chooses and builds the kernel backend that fits a device."""

import logging
import os

import torch
from blockyard.kernels.interface import Backend, BackendName, LinearsName

logger = logging.getLogger(__name__)


def choose_backend(
    device: torch.device,
    *,
    requested: BackendName = "auto",
    deterministic: bool = False,
    linears: LinearsName = "full",
) -> Backend:
    """Return the backend for a device: Triton on CUDA, C++ on a CPU with a compiler, PyTorch elsewhere, unless
    `requested` names one. Deterministic mode needs PyTorch on a CPU. Only the C++ kernels have int8 linears.

    Raises ValueError for a combination that no backend serves.
    """
    if deterministic and (device.type != "cpu" or requested in ("triton", "cpu")):
        raise ValueError(
            f"deterministic mode needs the torch backend on a CPU, got backend {requested!r} on {device}"
        )
    if requested == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"the triton backend on {device} needs TRITON_INTERPRET=1; use backend 'torch' there"
        )
    if requested == "cpu" and device.type != "cpu":
        raise ValueError(f"the cpu backend does not serve {device}")
    if linears == "int8" and (deterministic or device.type != "cpu" or requested not in ("auto", "cpu")):
        mode = "deterministic mode" if deterministic else f"backend {requested!r} on {device}"
        raise ValueError(f"linears in int8 are for the cpu backend, not for {mode}")
    backend, reason = _build(device, requested, deterministic, linears)
    logger.info("kernel backend %s on %s: %s", backend.name, device, reason)
    return backend


def _build(
    device: torch.device, requested: BackendName, deterministic: bool, linears: LinearsName
) -> tuple[Backend, str]:
    # Imported lazily: a CPU worker never loads triton.
    if deterministic:
        from blockyard.kernels.torch.deterministic import DeterministicTorchBackend

        return DeterministicTorchBackend(), "deterministic mode"
    if requested == "triton" or (requested == "auto" and device.type == "cuda"):
        from blockyard.kernels.triton.backend import TritonBackend

        return TritonBackend(), "requested" if requested == "triton" else "CUDA is available"
    if requested == "torch" or device.type != "cpu":
        from blockyard.kernels.torch.backend import TorchBackend

        return TorchBackend(), "requested" if requested == "torch" else "neither CUDA nor a CPU"
    return _build_for_cpu(is_wanted=requested == "cpu", linears=linears)


def _build_for_cpu(*, is_wanted: bool, linears: LinearsName) -> tuple[Backend, str]:
    """Return the C++ backend, or PyTorch's if the C++ kernels are unavailable, with the reason. Raises ValueError if
    they or int8 linears are wanted and unavailable."""
    from blockyard.kernels.cpu.backend import CpuBackend
    from blockyard.kernels.cpu.extension import ExtensionUnavailable, load_extension
    from blockyard.kernels.torch.backend import TorchBackend

    try:
        library = load_extension()
    except ExtensionUnavailable as error:
        if is_wanted or linears == "int8":
            raise ValueError(f"the cpu backend is unavailable: {error}") from error
        return TorchBackend(), f"slower than the cpu backend, which is unavailable: {error}"
    if linears == "int8" and not library.has_int8:
        raise ValueError("linears in int8 need a CPU with AVX-512 VNNI or AVX2; this one has neither")
    reason = "requested" if is_wanted else "no CUDA"
    return CpuBackend(library, linears=linears), reason if linears == "full" else f"{reason}, linears in int8"
