"""OpenAI's HTTP API over the same calls as gRPC (../calls.py): a thin shell that turns JSON into GenerateRequests.

protocol.py    connections: what is no HTTP, how long anybody may be silent
gateway.py     the port: socket, TLS, lifetime
routes.py      paths; who may call them; the end of each call
body.py        a body within its bounds -> a JSON object
fields.py, sampling_fields.py, unsupported.py, chat_request.py, completion_request.py    -> GenerateRequests
structures.py, tokens.py    the same for structured output, and for tokenising
openapi.py     all paths and fields as a document, from the tables that check them
about.py       what the port tells of its router: model, health, version, metrics
cors.py        which web pages may call
outputs.py     several prompts as one stream of deltas
choices.py, logprobs.py, token_texts.py, answers.py, sse.py    deltas -> JSON
rate_headers.py    what is left of a minute's requests and tokens
http_errors.py    errors -> status and body, in the one place
"""
