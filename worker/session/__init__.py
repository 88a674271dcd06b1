"""Session: the streams from routers, with requests in, outputs out, drains and other orders of an operator.

Does not own the engine behind them, or what operators see of it (../inspection/).

Output that a router has not read yet is merged, so an outbox never holds more rows than there are sequences. Routers
keep gRPC's receive window small: otherwise the transport would buffer megabytes before a writer waits. A load that has
changed is reported every 50 ms between tokens and pongs, and at most 200 times a second to all routers together.
"""
