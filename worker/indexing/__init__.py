"""Indexing: publishes this worker's blocks to the prefix index, and checks that the index agrees.

Does not own the index (proto/index/) or the cache (../cache/).
"""
