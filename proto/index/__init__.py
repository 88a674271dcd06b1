"""The prefix index: its contract, its form in Redis, and a twin in memory for tests and simulation.

Does not own which process writes to it (worker/indexing/) or reads it (router/dispatch/).

There is no journal of each berth's blocks: a dead berth is ignored at look-ups and removed by walking the buckets in
slices. Purging starts only after two leases of unbroken service, because after an outage every lease has lapsed.
"""
