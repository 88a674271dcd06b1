"""Traits: how the layers of a family's models may differ from Llama's, and how config.json says so.

Owns the contract of a family's module (../families/). Names no architecture. Imports no torch.
"""
