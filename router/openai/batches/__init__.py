"""Batches: files of requests that clients upload, and the answers to them, on local disk.

Does not own how a request is answered (../completions.py) or the paths (../routes.py).
"""
