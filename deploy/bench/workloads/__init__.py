"""Loads for `blockyard bench`: which requests are sent, when, and with which prefixes. Pure.

Does not own sending them (../traffic.py).
"""
