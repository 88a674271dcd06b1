"""Demo model: a small checkpoint, and the program that trained it.

Owns its data, tokenizer and training. Does not own serving it (../demo/).
"""
