"""Sampling: edits, filters and draws from the logits of all rows of a step, and log-probabilities.

Does not own grammars (../grammar/).
"""
