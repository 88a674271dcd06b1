"""The C++ kernels for CPUs: built once on a machine, called through ctypes, recorded and replayed.

Does not own operations that PyTorch serves as well (../torch/).
"""
