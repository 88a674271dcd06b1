"""Linear layers whose weight has 4 or 8 bits, on a GPU: layout, kernels, tile sizes and launches.

Does not own what the numbers mean (../../quantised.py), or linears in full precision, which are PyTorch's.
"""
