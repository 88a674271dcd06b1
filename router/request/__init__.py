"""Checks a client's request and fills in every default.

Does not own OpenAI's JSON (../openai/requests/), nor who may send it (../admission/).
"""
