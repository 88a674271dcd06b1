"""Host size: how much host memory a worker takes for blocks, and whether the machine has it.

Reads what the kernel reports of the machine and of this process's control group. The arithmetic is in
memory/kv_size.py.
"""

from pathlib import Path

import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.memory.kv_size import HostSize, host_size

GIB = 2**30
DEFAULT_SWAP_BYTES = 4 * GIB
DEFAULT_SWAP_SHARE = 0.25
"""Largest share of the available memory for swapping, where the settings name no size."""
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def size_host_memory(config: EngineConfig, device: torch.device, block_bytes: int) -> HostSize:
    """Return how many blocks each rank's host memory is to hold. Raises ValueError for more than the machine has
    memory for, which all ranks share.

    The simulated engine is not refused: its blocks take no memory.
    """
    takes_memory = config.engine == "model"
    available = available_bytes() if takes_memory else None
    if available is not None:
        available //= config.tensor_parallel_size
    size = host_size(
        swap_bytes=_swap_bytes(config, device, available),
        cache_bytes=int(config.host_cache_gib * GIB),
        block_bytes=block_bytes,
    )
    if available is not None and size.total_bytes > available:
        raise ValueError(
            f"host blocks would take {size.total_bytes / GIB:.2f} GiB, and {available / GIB:.2f} GiB of memory "
            "are available: lower --swap-space-gib or --host-cache-gib"
        )
    return size


def _swap_bytes(config: EngineConfig, device: torch.device, available: int | None) -> int:
    if config.preempt == "recompute":
        return 0
    if config.swap_space_gib is not None:
        return int(config.swap_space_gib * GIB)
    if device.type == "cpu" and config.preempt == "auto":
        return 0
    if available is None:
        return DEFAULT_SWAP_BYTES
    return min(DEFAULT_SWAP_BYTES, int(available * DEFAULT_SWAP_SHARE))


def available_bytes() -> int | None:
    """Return the bytes of memory that are available without swapping, or None where the system does not say."""
    known = [number for number in (_of_machine(), _of_control_group()) if number is not None]
    return min(known) if known else None


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_control_group() -> int | None:
    """Return the bytes that a control group of version 2 leaves, None without a limit. Inactive file pages count as
    free."""
    try:
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        statistics = (_CONTROL_GROUP / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    unused_files = dict(zip(statistics[::2], statistics[1::2], strict=False)).get("inactive_file", "0")
    return max(0, limit - used + int(unused_files))
