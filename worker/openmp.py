"""How long OpenMP's waiting threads spin before they sleep. libgomp reads that once, when torch is loaded."""

import os

SPIN_COUNT = 30_000
"""Turns of a waiting thread. With libgomp's own 300,000, threads beside one other busy program wait whole time slices
for one another; with the 1,000 it goes down to by itself, they sleep between any two operations, and to be woken takes
long on a virtual machine (bench.spinning)."""


def bound_spinning() -> None:
    """For a process that is about to load torch, and has not been told otherwise by its environment."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
