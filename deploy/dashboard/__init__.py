"""Live page inside Ray's dashboard: block pools, requests and charts, which the cluster's routers provide.

Does not own the metrics for Grafana (../grafana/).
"""
