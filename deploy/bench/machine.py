"""Machine and versions of a benchmark, so that two results can be compared."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("blockyard", "grpcio", "protobuf")
"""Packages of the load generator's own process."""
NUMBERS = ("cpu family", "model", "stepping")
"""Fields that distinguish CPUs of one name: in a virtual machine, Zen 3 and Zen 4 are both `AMD EPYC`."""
VECTOR_UNITS = frozenset(
    {
        "avx2",
        "fma",
        "avx_vnni",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_int8",
        "amx_bf16",
    }
)
"""Vector extensions that our kernels use, as Linux names them."""


def machine() -> dict[str, Any]:
    return {**cpu(_cpuinfo()), "cores": os.cpu_count(), "system": platform.system()}


def cpu(cpuinfo: str | None) -> dict[str, Any]:
    """Return the CPU's name, numbers and vector units from the text of /proc/cpuinfo. None: there is no such file.

    A missing name is "unknown CPU"; other missing fields are empty.
    """
    if cpuinfo is None:
        return {"cpu": platform.processor() or "unknown CPU", "cpu_numbers": {}, "vector_units": []}
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():  # Keeps the first processor: the others are like it.
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return {
        "cpu": fields.get("model name", "unknown CPU"),
        "cpu_numbers": {name: int(fields[name]) for name in NUMBERS if fields.get(name, "").isdecimal()},
        "vector_units": sorted(VECTOR_UNITS.intersection(fields.get("flags", "").split())),
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def _cpuinfo() -> str | None:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
