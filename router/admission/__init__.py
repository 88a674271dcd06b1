"""Admission of calls: bearer tokens, rate limits, the ledger of admitted requests, and fairness between tenants.

Does not own what a call must look like (../request/).
"""
