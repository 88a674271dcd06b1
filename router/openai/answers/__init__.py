"""OpenAI's JSON answers: choices, log-probabilities and usage, whole or as chunks of a stream.

Does not own what was generated (../../generation/).
"""
