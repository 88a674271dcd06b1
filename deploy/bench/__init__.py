"""Measurements of `blockyard bench`: sends a load, measures it and shows the results.

Does not own the loads (workloads/).
"""
