"""The supervisor, a Ray actor that keeps workers and routers alive and tells each of the others.

Does not own the start or end of a cluster (../lifecycle/).
"""
