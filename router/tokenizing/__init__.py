"""Tokenizer processes: they render chat templates, encode prompts and name their blocks.

Does not own decoding, which ../generation/ does with proto/text.py.

A process serves prompts over a socket of the event loop: Python's process pool cost three to four times the CPU for
each. Texts above 64 Ki characters have a process of their own, so that short prompts never wait for a long one.
"""
