"""Numbers of 8 bits in Triton kernels: their conversions, and the devices that have instructions for them.

Does not own pools of KV or linears, whose kernels convert by these.
"""
