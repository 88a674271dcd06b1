"""Scheduling: queues, token budgets, capacity, preemption, and the commit of a step's tokens. Pure Python.

Does not own the blocks (../cache/) or the computation (../execution/).
"""
