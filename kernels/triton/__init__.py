"""The Triton kernels and their launches.

Does not own the plan of attention (../attention/).
"""
