"""Startup: from settings to an engine that is ready. Loads the model, sizes the pools, warms up with a first request.

Does not own the settings (../config.py).
"""
