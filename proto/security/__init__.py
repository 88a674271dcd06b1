"""TLS, the cluster's secret, and files that only their owner may read.

Does not own tokens of clients (router/admission/).
"""
