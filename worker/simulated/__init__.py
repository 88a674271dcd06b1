"""Simulated model: a clock instead of weights. The real scheduler, cache and session run on it.

Used by tests, `--engine simulated` and the simulation.
"""
