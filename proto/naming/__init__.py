"""Names on which all processes must agree: KV blocks, models, code versions, and identifiers of clients.

Pure but for reading the files that are named.
"""
