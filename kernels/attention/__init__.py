"""The plan of one step's attention: which row reads which keys, and which prefix is read once for many rows.

Owns index arithmetic alone. Does not own any kernel (../triton/, ../cpu/, ../torch/).
"""
