"""The streams from routers: requests in, outputs out, drains and other orders of an operator.

Does not own the engine behind them, nor what is shown of it (../inspection/).
"""
