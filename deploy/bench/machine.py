"""What a benchmark ran on: the machine and the versions, so that two results can be held side by side."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("blockyard", "grpcio", "protobuf")
"""Of the load generator's own process."""


def machine() -> dict[str, Any]:
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.system()}


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU"
    )
