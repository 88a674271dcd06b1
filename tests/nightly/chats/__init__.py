"""Chats of real models: their own tokenizers and chat templates, from package registries, never in this repository.

Owns the pins of these packages. Does not own the guard's own tests (tests/unit/router/test_tokenizing.py).
"""
