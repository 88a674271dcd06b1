"""Quantised checkpoints: which formats are read, what a checkpoint must hold, and how it becomes weights in memory.

scheme.py and compressed.py read config.json, stored.py names the tensors, formats.py and loading.py read them. The
layout in memory is in kernels/quantised.py, its arithmetic in the backends.
"""
