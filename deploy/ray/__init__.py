"""Ray's head and nodes: starts a local head, keeps it alive, and compares what nodes have installed.

Does not own the actors on it (../supervision/).
"""
