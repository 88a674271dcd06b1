"""OpenAI's Responses API: requests, stored responses, and the face of an answer.

Does not own chats, into which requests are translated (../requests/), or Redis (../../sealed_records.py).
"""
