"""The Grafana dashboard, Prometheus rules and alerts, generated from one table."""
