"""The prefix index: its contract, its form in Redis, and a twin in memory for tests and simulation.

Does not own which process writes to it (worker/indexing/) or reads it (router/dispatch/).
"""
