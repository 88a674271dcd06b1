"""`blockyard bench`: what is measured of a load, and how it is shown.

Does not own the loads (workloads/).
"""
