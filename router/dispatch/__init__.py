"""Finds a worker for each request: looks up its prefix, places it, and lets it wait until a worker has room.

Does not own the choice itself (../placement/).
"""
