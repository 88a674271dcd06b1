"""What operators see of a worker: its block pool and sequences, as messages and as text.

Changes nothing.
"""
