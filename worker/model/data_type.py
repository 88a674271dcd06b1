"""Data type of a model's computation, from the request, the checkpoint and what the CPU multiplies.

Pure, except that it reads /proc/cpuinfo. A worker decides on its own node; commands call the same function on their own
machine.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockyard.worker.config import EngineConfig
from blockyard.worker.model.config import DataTypeName, ModelConfig

RequestedDataType = Literal["auto", "float32", "bfloat16", "float16"]
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenDataType:
    name: DataTypeName
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def choose_dtype(
    requested: RequestedDataType,
    checkpoint: DataTypeName,
    *,
    on_cpu: bool,
    has_bfloat16: bool,
    deterministic: bool = False,
    simulated: bool = False,
) -> ChosenDataType:
    """Return the data type to compute in, and why. `has_bfloat16` says whether the CPU multiplies bfloat16.

    "auto" is the checkpoint's own type where the device multiplies it, else float32, which holds every bfloat16 and
    float16 exactly. Raises ValueError for deterministic mode in anything but float32.
    """
    if deterministic:
        if requested not in ("auto", "float32"):
            raise ValueError(f"deterministic mode computes in float32 only, not {requested}")
        return ChosenDataType(name="float32", why="deterministic mode computes in nothing else")
    if requested != "auto":
        return ChosenDataType(name=requested, why="as --dtype says")
    if simulated:
        return ChosenDataType(name="float32", why="the simulated engine computes nothing")
    if not on_cpu or checkpoint == "float32":
        return ChosenDataType(name=checkpoint, why="the checkpoint's")
    if checkpoint == "bfloat16" and has_bfloat16:
        return ChosenDataType(name="bfloat16", why="the checkpoint's, and this CPU has instructions for it")
    return ChosenDataType(name="float32", why=f"this CPU has no {checkpoint} instructions")


def dtype_of(
    engine: EngineConfig, model: ModelConfig, *, on_cpu: bool, has_bfloat16: bool | None = None
) -> ChosenDataType:
    """Return a worker's data type from its settings. With `has_bfloat16` None, ask this machine. Raises ValueError."""
    return choose_dtype(
        engine.dtype,
        model.dtype,
        on_cpu=on_cpu,
        has_bfloat16=cpu_has_bfloat16() if has_bfloat16 is None else has_bfloat16,
        deterministic=engine.deterministic,
        simulated=engine.engine == "simulated",
    )


def cpu_has_bfloat16(cpuinfo: str | None = None) -> bool:
    """Return whether the CPU multiplies bfloat16. Other CPUs widen it to float32 first.

    `cpuinfo` is the text of /proc/cpuinfo. A CPU that names no flags has none.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            return False
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    named = (value for name, _, value in lines if name.strip() in ("flags", "Features"))
    return any(not _BFLOAT16_FLAGS.isdisjoint(flags.split()) for flags in named)
