"""Execution of planned steps on a model: inputs, overlap with the host, CUDA graphs, and the search for a failing
request.

Does not own the plan (../scheduling/) or the layers (../model/).
"""
