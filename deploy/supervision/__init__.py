"""Supervisor: a Ray actor that keeps workers and routers alive and tells routers where workers are.

Does not own the start or end of a cluster (../lifecycle/).
"""
