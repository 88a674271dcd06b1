"""Benchmark of the engine alone, through a router, and beside other engines: workloads, systems, trials and report.

Does not own timing of single kernels (../kernels/) or of parts of a step (../profile/).
"""
