"""Every metric with its meaning, and the two ways out: Prometheus and Ray.

Does not own the readings (router/metric_readings.py, worker/metrics.py).
"""
