"""Transfer: KV blocks from one worker to another, over connections of their own.

A worker only reads what it asked for, into memory that nothing else sees. No worker writes into another one. Owns the
connections, the protocol on them and the checks of what arrives. Does not own which blocks are fetched
(../scheduling/pulls.py), from where (the router), or the memory (../memory/).
"""
