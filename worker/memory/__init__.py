"""Memory in bytes, on devices and hosts: sizes of the KV cache, what a GPU has left, and copies between them.

Does not own which blocks move (../cache/).
"""
