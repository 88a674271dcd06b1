"""Benchmark of the router beside sglang-router, with scripted workers: clients, systems, trials and report.

Does not own a model's computation: the workers compute nothing.
"""
