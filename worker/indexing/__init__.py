"""Tells the prefix index which blocks this worker holds, and checks that the index agrees.

Does not own the index (proto/index/) or the cache (../cache/).
"""
