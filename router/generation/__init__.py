"""Runs a request on workers until its last token: submit, replay after a failure, join outputs, turn tokens into text.

Does not own the choice of a worker (../dispatch/), nor the protocol of the client (../services/, ../openai/).
"""
