"""Placement: policies, scores and rates that choose a worker for a request, as pure functions of a snapshot.

Does not own waiting or booking (../dispatch/), or the state of the workers (../cluster/).
"""
