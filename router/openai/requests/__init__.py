"""OpenAI's JSON requests, checked field by field and turned into GenerateRequests.

Does not own the checks that every protocol shares (../../request/).
"""
