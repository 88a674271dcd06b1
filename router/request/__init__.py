"""Request checks: validate a client's request and fill in all defaults.

Does not own OpenAI's JSON (../openai/requests/) or permissions (../admission/).
"""
