"""Names on which all processes must agree: KV blocks, models, code versions, and identifiers of clients.

Reads the files that it names, downloads models from the hub, and keeps digests of weights on disk. All else is pure.
"""
