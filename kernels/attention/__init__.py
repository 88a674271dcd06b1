"""Attention of one step as work items: who reads which keys, and which prefix is read once for many rows.

Plans alone. Does not own any kernel (../triton/, ../cpu/, ../torch/).
"""
