"""How long OpenMP's waiting threads spin before they sleep. libgomp reads that once, when torch is loaded."""

import os

from blockyard.kernels.cpu.extension import ExtensionUnavailable, prospect

SPIN_COUNT = 3_000
"""Turns of a waiting thread. The more, the longer threads beside another busy program wait for one another: with
libgomp's own 300,000 whole time slices. With fewer they sleep between any two operations, and to be woken takes long on
some machines: 1,000 took a fifth longer alone on one, and no longer on another (bench.spinning)."""
PYTORCH_SPIN_COUNT = 30_000
"""Where PyTorch computes what the C++ kernels would: there more time passes between operations."""


def bound_spinning() -> None:
    """For a process that is about to load torch, and has not been told otherwise by its environment."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_spin_count()))


def _spin_count() -> int:
    try:
        prospect()
    except ExtensionUnavailable:
        return PYTORCH_SPIN_COUNT
    return SPIN_COUNT
