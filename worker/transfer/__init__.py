"""Transfer: KV blocks from one worker to another, over connections of their own.

A worker only reads what it asked for, into memory that nothing else sees. No worker writes into another one. Owns the
connections, the protocol on them and the checks of what arrives. Does not own which blocks are fetched
(../scheduling/pulls.py), from where (the router), or the memory (../memory/).

Two ways to copy a neighbour's memory were not built. `process_vm_readv` took 45 ms for 100 MiB, as much CPU time as the
Unix socket (54 ms; TCP with TLS takes 215 ms). Shared memory would have to hold the pool itself, on small pages that
every step reads.
"""
