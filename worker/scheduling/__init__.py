"""Scheduling: queues, token budgets, capacity, preemption, and the commit of a step's tokens. Pure Python.

Does not own the blocks (../cache/) or the computation (../execution/).

Order is one number fixed at arrival, `arrival time + priority x ageing seconds`, so queues stay sorted and no request
starves. The first sequence in the order is never a victim of preemption, so some sequence always makes progress. One
that was preempted `--max-preemptions` times is admitted again only with room for all that it can need. The order alone
would not keep batches apart: 128 running decodes of one lengthen each step of a chat.
"""
