"""The KV cache's bookkeeping: block pool, block tables, prefix cache and host memory. Pure Python.

Does not own the tensors (../memory/, ../execution/) or when a block is needed (../scheduling/).
"""
