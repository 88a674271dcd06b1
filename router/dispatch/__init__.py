"""Dispatch: looks up a request's prefix, places the request, and lets it wait until its worker has room.

Does not own the choice of the worker (../placement/).
"""
