"""Bookkeeping of the KV cache (block pool, block tables, prefix cache, host memory) and of adapter slots. Pure Python.

Does not own the tensors (../memory/, ../execution/) or decide when a block is needed (../scheduling/).
"""
