"""OpenAI's HTTP API over the same calls as gRPC (../calls/): its port, its routes, and its document.

Does not own HTTP itself (http/), the fields of requests (requests/) or the form of answers (answers/).
"""
