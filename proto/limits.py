"""Limits that more than one process or interface checks, each stated here alone.

Owns the bounds of sampling fields, lists, structured outputs, priorities, pages, messages and ports. A router refuses a
client's request by them. A worker checks them again, because a bad submit must not harm its other requests.
Does not own limits that an operator sets (router/config.py, worker/config.py) or that one module alone needs.
"""

from collections.abc import Mapping

MAX_OUTPUT_TOKENS = 2**24
"""Tokens. No model has a longer context, so a larger `max_tokens` is a mistake and not a request for "all there is"."""
MAX_LOGIT_BIAS = 100
"""Most that a request may add to a logit or subtract from it, as in OpenAI's API."""
MAX_LOGPROBS = 20
"""Most alternatives, the most likely tokens, that one position reports, as in OpenAI's API. Sampling computes no
more."""

RANGES: Mapping[str, tuple[float, float]] = {
    # The distribution is nearly flat at 100, and float32 is far from its limits.
    "temperature": (0, 100),
    "min_p": (0, 1),
    # As in OpenAI's API.
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    # A factor and not a difference: 0 would divide by zero.
    "repetition_penalty": (0.01, 100),
    # An exponent of the number of tokens.
    "length_penalty": (-10, 10),
    "max_tokens": (1, MAX_OUTPUT_TOKENS),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
"""Lowest and highest value of each sampling field that is set. Both ends are allowed, NaN is not."""
COUNTS: Mapping[str, int] = {
    "stop": 16,
    "stop_token_ids": 64,
    "logit_bias": 1024,
    "allowed_token_ids": 65_536,
    "bad_token_ids": 1024,
    "bad_words": 64,
}
"""Most entries of each repeated sampling field. A longer one is refused before its entries are read."""
MAX_STOP_CHARS = 256
MAX_BAD_WORD_CHARS = 64
MAX_PRIORITY = 100
"""The largest magnitude of a priority, which may be negative."""
MAX_PAUSE_SECONDS = 3600
"""The longest pause that a session may announce. No GPU keeps an unused block for longer."""

MAX_STRUCTURED_BYTES = 65_536
"""UTF-8 bytes of any grammar, such as a JSON schema."""
MAX_REGEX_BYTES = 8_192
"""UTF-8 bytes of a regular expression. Before its first mask llguidance needs seconds for `a?` written 10,000 times,
and 0.2 s for 4,000 times."""
MAX_SCHEMA_DEPTH = 100
"""Objects and arrays of a schema inside one another. The checks recurse into them, and llguidance stops at 128."""
MAX_TOOLS = 128
"""Most tools of a chat, and most calls of one message, as in OpenAI's API."""

MAX_PAGE_SIZE = 1000
"""Most entries in one page of an inspection call."""
MAX_MESSAGE_BYTES = 16 * 2**20
"""The largest gRPC message that a router or a worker reads from those that call it."""
MAX_RESPONSE_BYTES = 64 * 2**20
"""The largest gRPC message that a router answers, and that our clients and a router read of an answer.

One may have log-probabilities of many outputs, or a large pool. gRPC's own default is 4 MiB."""
MAX_PORT = 65_535
