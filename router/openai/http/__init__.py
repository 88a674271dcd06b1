"""HTTP as the gateway speaks it: connections, bodies, headers, errors, JSON and server-sent events.

Does not own what a route means (../).
"""
