"""Logits to tokens: edits, filters, draws and log-probabilities of all rows of a step.

Does not own grammars (../grammar/).
"""
