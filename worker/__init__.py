"""Worker: one engine with its KV block pool, and the server in front of it.

The engine (engine.py, with sequences/, cache/, scheduling/, execution/, sampling/ and model/) runs without Ray, Redis
and gRPC. The server (server.py) adds session/, indexing/ and inspection/. Never imports a router. Only actor.py knows
Ray.
"""
