"""Dispatch: looks up a prompt's prefix in the index, places the request, and makes it wait until its worker has room.

Does not own the choice of the worker (../placement/).
"""
