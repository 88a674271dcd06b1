"""Anthropic's Messages API: its requests as chats, and its form of answers, events and errors.

Does not own what a chat is (../requests/chat.py), how calls run (../completions.py) or the routes (../routes.py).
"""
