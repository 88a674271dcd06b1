"""Generation: runs a request on workers to its last token.

It submits, replays after a failure, joins outputs, and turns tokens into text. Does not own the choice of a worker
(../dispatch/) or the client's protocol (../services/, ../openai/).
"""
