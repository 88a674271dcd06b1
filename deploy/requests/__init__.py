"""Sends requests from the command line, and shows the answers.

Does not own the clients (router/client/).
"""
