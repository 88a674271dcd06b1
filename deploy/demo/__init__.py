"""`make demo`: a whole cluster on this machine, real chats through it, and what its block pools look like.

Does not own the demo's model (../demo_model/).
"""
