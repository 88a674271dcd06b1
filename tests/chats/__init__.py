"""Chats of real models: their own tokenizers and chat templates, from package registries, never in this repository."""
