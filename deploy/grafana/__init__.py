"""Grafana dashboard, Prometheus rules and alerts.

Owns the dashboard and the rules with vLLM's names, which it generates. Does not own the metrics (proto/metrics/).
"""
