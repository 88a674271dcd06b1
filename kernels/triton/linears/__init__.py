"""Linear layers whose weight has 4 or 8 bits, on a GPU: layout, kernels, tile sizes and launches.

Does not own what the numbers mean (../../quantised.py), or linears in full precision, which are PyTorch's.

From 512 tokens on the weight is written out in parts and cuBLAS multiplies. No GPU has measured that number: it is an
estimate from the times of both products on an H100.
"""
