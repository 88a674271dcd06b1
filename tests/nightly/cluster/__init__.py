"""Whole clusters as real processes."""
