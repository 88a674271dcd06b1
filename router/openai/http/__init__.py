"""HTTP of the gateway: connections, bodies, headers, errors, JSON and server-sent events.

Does not own the meaning of a route (../).
"""
