"""Benchmark of the whole path: our cluster beside vLLM servers behind sglang-router, with one HTTP client for all.

Owns starting whole systems, their processes by role, and the report. Does not own the loads or their measurement
(deploy/bench/), the engine alone (../engine/) or the router alone (../router/).
"""
