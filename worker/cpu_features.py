"""What this machine's CPU computes by itself, as the kernel tells."""

from pathlib import Path

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def has_bfloat16(cpuinfo: str | None = None) -> bool:
    """Whether the CPU multiplies bfloat16; elsewhere it is widened to float32 first. `cpuinfo` is the text
    of /proc/cpuinfo; where there is none nobody knows, and the answer is yes."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            return True
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = {
        flag for name, _, value in lines if name.strip() in ("flags", "Features") for flag in value.split()
    }
    return not flags or not flags.isdisjoint(_BFLOAT16_FLAGS)
