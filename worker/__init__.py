"""A worker: one device's block pool, prefix cache, scheduler, model and engine, and the session it holds with routers.

Importing it bounds how long OpenMP's waiting threads spin, unless the environment says otherwise. libgomp reads that
once, when torch is loaded.
"""

import os

SPIN_COUNT = 30_000
"""Turns of a waiting thread, about 1.5 ms, before it sleeps. libgomp's own 300,000 double a step beside one other busy
program; 1,000 let both threads sleep between any two operations, and on a virtual machine to be woken takes long."""

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
