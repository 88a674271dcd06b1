"""Calls: authentication, deadline, limits and the domain handler of a call, the same for all protocols.

Does not own gRPC (../services/) or HTTP (../openai/).
"""
