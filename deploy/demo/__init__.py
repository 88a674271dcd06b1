"""`make demo`: starts a cluster on this machine, runs real chats on it, and shows its block pools.

Does not own the demo's model (../demo_model/).
"""
