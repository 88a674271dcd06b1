"""What router, worker and commands agree on: messages, names, the prefix index, metrics and security.

Imports none of the other packages.
"""
