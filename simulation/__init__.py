"""Runs the real router and worker in one process, in virtual time, without threads, sockets or a GPU.

Owns the event loop, the network, gRPC's calls in memory, the way to the index, and one process each for router and
worker. Does not own what is run: tests/unit/simulation brings faults and checks, bench/placement/simulation workloads
and hardware.
"""
