"""Profile of an engine's steps: time of each part, whole steps beside the roofline, and garbage collection.

Does not own timing of single kernels (../kernels/).
"""
