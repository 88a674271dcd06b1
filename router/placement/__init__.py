"""Placement: policies, scores and rates that choose a worker for a request, as pure functions of a snapshot.

Does not own waiting or booking (../dispatch/), or the state of the workers (../cluster/).

A sweep chose the weights of the cost (bench/placement/sweep.py). Priced by blocks in use instead of contexts, a giant
group of sharers looked cheap and stayed on its workers. Beyond saturation the term `others` gathers short prompts on
one worker: the mean time to the first token falls, and its tail rises.
"""
