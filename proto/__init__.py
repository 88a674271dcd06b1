"""The code that router, worker and commands share: messages, names, limits, text, index, metrics, security, runtime.

Imports no other package of the project.
"""
