"""Models as their checkpoints describe them: configuration, weights, rotary embedding and the decoder's forward pass.

Does not own kernels (kernels/) or sampling (../sampling/).

Deterministic mode needs a matrix library that computes all rows of a tile alike. On one CPU (torch 2.11, beside an
H100) the last of 16 rows with 2,000 inputs got other bits. No check at the start finds that, but
`tests/*/kernels/test_deterministic.py` does.
"""
