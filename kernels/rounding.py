"""Rounding: words on all that it depends on beside the inputs, namely libraries, their settings and the processor.

Two machines with equal words compute equal bits. The words may be stricter than needed. A library chooses its kernels
by more than it tells, so the whole model of a processor counts.
"""

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

import torch

SETTINGS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that let the libraries below PyTorch choose other kernels."""
_CPU_FACTS = ("vendor_id", "model name", "CPU implementer", "CPU part")
_CPU_FLAGS = ("flags", "Features")
_VECTOR_FLAGS = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "fp", "i8mm", "sse", "ssse", "sve")
_HASH_DIGITS = 8


def pytorch_words(device: torch.device) -> tuple[str, ...]:
    """Return words `key=value` about PyTorch on a device. None has a space."""
    set_here = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    words = [f"torch={torch.__version__}:{_build_hash()}", _processor(device)]
    return (*words, f"settings={_hash(set_here)}") if set_here else tuple(words)


@cache
def _build_hash() -> str:
    """Return a hash of how PyTorch was built, with the libraries below it, and of the C library's version."""
    return _hash([torch.__config__.show(), *platform.libc_ver()])


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"gpu={torch.cuda.get_device_name(device).replace(' ', '-')}:{major}.{minor}"
    return f"cpu={torch.backends.cpu.get_cpu_capability()}:{_cpu_hash()}"


@cache
def _cpu_hash() -> str:
    """Return a hash of the CPU's model and vector units. Flags of the system, such as mitigations, do not count."""
    facts = {platform.machine()}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key in _CPU_FACTS:
            facts.add(f"{key} {value}")
        elif key in _CPU_FLAGS:
            facts.update(flag for flag in value.split() if flag.startswith(_VECTOR_FLAGS))
    return _hash(sorted(facts))


def _hash(facts: list[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:_HASH_DIGITS]
