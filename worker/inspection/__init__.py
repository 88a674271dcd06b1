"""Inspection: what operators see of a worker's block pool and sequences, as messages and as text.

Changes nothing.
"""
