"""Every metric with its meaning, and two exporters: Prometheus and Ray.

Does not own the readings (router/metric_readings.py, worker/metrics.py).
"""
