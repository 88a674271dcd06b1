"""Session: the streams from routers, with requests in, outputs out, drains and other orders of an operator.

Does not own the engine behind them, or what operators see of it (../inspection/).
"""
