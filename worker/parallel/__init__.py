"""Tensor parallelism: one model over several ranks. Owns what they exchange, and which part of the model each has.

Does not compute (model/, execution/), or decide what a step computes: rank 0 alone has a scheduler.

Sums are rounded in another order with each number of ranks, so the number is a part of the model's fingerprint. Across
machines, steps take the connections, and sums on CPUs gloo over TCP, which is not encrypted. There a failed step ends
the worker, because neither NCCL nor gloo can end a wait. A divided worker lends no blocks: rank 0 has only a part of
each.
"""
