"""Benchmark of every kernel against the roofline: cases, timing and report.

Does not own the kernels or their references (kernels/).
"""
