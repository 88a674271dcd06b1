"""Adapters: the LoRA adapters of each model of a cluster, which operators add and remove while it runs.

Owns which names exist and whose they are, where all routers find them, and how a worker gets one. Does not own what one
costs a worker (../placement/adapters.py), or its weights (the workers).
"""
