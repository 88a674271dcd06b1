"""Faults on real processes, and the invariants that they must leave whole."""
