"""PyTorch's operations as a backend, its deterministic mode, and the plain reference of every operation.

Runs on any CPU, without a compiler.
"""
