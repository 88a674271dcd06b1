"""Structured output: compiles grammars in a separate process, and fills masks of the tokens that may follow.

Does not own how masks reach the logits (../execution/).
"""
