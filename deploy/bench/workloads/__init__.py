"""Workloads of `blockyard bench`: their requests, arrival times and shared prefixes. Pure.

Does not own sending them (../traffic.py).
"""
