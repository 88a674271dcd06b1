"""Benchmark of the prefix index in Redis beside llm-d's schema: memory, look-ups, writes and rebuild.

Does not own the index (proto/index/).
"""
