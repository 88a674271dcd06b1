"""Textbook figures of paged attention, computed by the real scheduler and pool, and the style of every plot.

Does not own benchmarks (bench/).
"""
