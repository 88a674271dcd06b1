"""Tokenizer processes: they render chat templates, encode prompts and name their blocks.

Does not own decoding, which ../generation/ does with proto/text.py.
"""
