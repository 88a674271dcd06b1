"""Parsing of answers: an output's text becomes reasoning, content and tool calls while it streams.

Owns the formats in which models write them, and the choice of a model's format. Does not own the JSON of answers
(../openai/answers/) or the chat template, which writes earlier calls into a prompt (../tokenizing/).
"""
