"""The contract between router, worker and commands: messages, names, limits, the prefix index, metrics and security.

Imports none of the other packages.
"""
