"""The live page inside Ray's dashboard: block pools, requests and charts, asked of the cluster's routers.

Does not own the metrics for Grafana (../grafana/).
"""
