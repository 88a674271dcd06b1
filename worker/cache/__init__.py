"""Bookkeeping of the KV cache (block pool, block tables, prefix cache, host memory) and of adapter slots. Pure Python.

Does not own the tensors (../memory/, ../execution/) or decide when a block is needed (../scheduling/).

Eviction learns odds, since no fixed order of kinds of blocks is good on all loads. One gained up to 0.13 of reuse over
LRU on some, and lost up to 0.25 on others (`python -m bench.placement.eviction`). Tenant shares alone do not help where
running sequences fill the memory, so some cached blocks are protected from admission. In a flood another tenant's
prompt was then found 59 times of 59, and without it never.
"""
