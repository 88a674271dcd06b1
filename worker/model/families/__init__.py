"""Families of models: what each architecture's config.json means, and how its checkpoints are named.

Owns the table of architectures, one module for each family, and how a family's layers differ from Llama's. Does not own
the model's sizes (config.py), or the forward pass (decoder.py). Imports no torch.
"""
