"""Families of models: what each architecture's config.json means, and how its checkpoints are named.

Owns the table of architectures, and one module for each family. Does not own how layers may differ (../traits/),
the model's sizes (config.py) or the forward pass (decoder.py). Imports no torch.
"""
