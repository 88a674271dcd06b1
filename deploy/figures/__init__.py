"""The figures that textbooks of paged attention give, computed here and now, and the look of every plot.

Does not own benchmarks (bench/).
"""
