"""Study of placement policies in virtual time: runs, settings sweep and report.

Does not own the policies (router/placement/) or the simulated cluster (simulation/).
"""
