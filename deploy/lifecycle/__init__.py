"""Checks, starts, changes and ends a cluster.

Does not own what keeps it alive meanwhile (../supervision/).
"""
