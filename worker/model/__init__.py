"""Models as their checkpoints describe them: configuration, weights, rotary embedding and the decoder's forward pass.

Does not own kernels (kernels/) or sampling (../sampling/).
"""
