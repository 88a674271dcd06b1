"""One run of the placement study: hardware profiles, workloads, and routers and workers in virtual time.

Does not own the virtual-time runtime (simulation/ at the root) or the comparison of runs (../).
"""
