"""Tensor parallelism: one model over several ranks. Owns what they exchange, and which part of the model each has.

Does not compute (model/, execution/), or decide what a step computes: rank 0 alone has a scheduler.
"""
