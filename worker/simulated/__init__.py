"""A model that is a clock: the real scheduler, cache and session run on it without weights.

For tests, `--engine simulated` and the simulation.
"""
