"""Ranks: the processes that share one model, and how rank 0 starts a step on all of them.

Rank 0 listens, and each other rank connects and proves that it knows the secret. Then rank 0 gives it a number, the
settings, and the names of the shared memory. The connection stays. Both ends of it send a pulse, so that rank 0 notices
a rank that has ended within milliseconds, and one that is frozen within seconds. Either ends the whole worker.

    worker's process                       another process of the node, or an actor
    leader = RankLeader(config, ...)
    spawn(leader), or give away ---------> run_rank(leader.address, secret, cluster)
    leader.connect()                       blocks until the worker stops, or raises RankLost
"""
