"""The `blockyard` command, and what runs a cluster: Ray, Redis, the supervisor and the dashboard.

The only package that imports both routers and workers.
"""
