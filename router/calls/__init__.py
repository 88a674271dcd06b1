"""What surrounds every call, whichever protocol it came by: authentication, deadline, limits, and its domain handler.

Does not own gRPC (../services/) or HTTP (../openai/).
"""
