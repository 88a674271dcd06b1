"""OpenMP: how long its waiting threads spin before they sleep. libgomp reads that once, when torch is loaded."""

import os

from blockyard.kernels.cpu.extension import ExtensionUnavailable, prospect

SPIN_COUNT = 3_000
"""Iterations of a waiting thread. More make threads wait longer for one another beside another busy program: whole time
slices with libgomp's own 300,000.

With fewer, threads sleep between any two operations, and waking takes long on some machines. 1,000 took a fifth longer
on one idle machine, and no longer on another (bench.spinning).
"""
PYTORCH_SPIN_COUNT = 30_000
"""Used where PyTorch computes instead of the C++ kernels: more time passes between its operations."""


def bound_spinning() -> None:
    """Limit how long OpenMP's threads spin, unless the environment does. Call it before torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_spin_count()))


def _spin_count() -> int:
    try:
        prospect()
    except ExtensionUnavailable:
        return PYTORCH_SPIN_COUNT
    return SPIN_COUNT
