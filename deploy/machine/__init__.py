"""This machine: processes, signals, ports, a private Redis, and the state file that remembers a cluster.

Does not own Ray (../ray/).
"""
