"""Batches: files of requests that clients upload, and the answers to them, on local disk.

Does not own how a request is answered (../completions.py) or the paths (../routes.py).

They run in the router: a process of their own would need a token that may act for every tenant, and answers would pass
HTTP twice. A line is sent only while fewer than 4 requests a worker lack their first token. One router of a machine has
the lock of `owner.lock` and runs the batches; the others create them and answer from disk. Lines are synced once a
second, so a loss of power costs a second of answers, which are computed again.
"""
