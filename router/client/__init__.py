"""Python clients of a cluster, one for asyncio and one that blocks. They import neither torch nor ray nor transformers.

    with Client("localhost:50051") as client:
        for delta in client.stream("def fibonacci(n):", max_tokens=64):
            print(delta.text, end="", flush=True)

The pure core is arguments.py, requests.py, results.py, stream_check.py and retry.py. The shell around it is aio.py,
from which sync.py is generated. TLS and tokens are in connection.py, the one tree of exceptions in errors.py.
"""

from blockyard.router.client.aio import AsyncClient
from blockyard.router.client.connection import TlsOptions
from blockyard.router.client.errors import (
    AbortedError,
    AuthenticationError,
    BlockyardError,
    FieldViolation,
    InvalidRequestError,
    LostTokensError,
    NotFoundError,
    OverloadedError,
    ServerError,
    TimedOutError,
    UnavailableError,
)
from blockyard.router.client.results import Completion, Delta, Embedding, Finish, Output, TokenLogprob
from blockyard.router.client.sync import Client

__all__ = [
    "AbortedError",
    "AsyncClient",
    "AuthenticationError",
    "BlockyardError",
    "Client",
    "Completion",
    "Delta",
    "Embedding",
    "FieldViolation",
    "Finish",
    "InvalidRequestError",
    "LostTokensError",
    "NotFoundError",
    "Output",
    "OverloadedError",
    "ServerError",
    "TimedOutError",
    "TlsOptions",
    "TokenLogprob",
    "UnavailableError",
]
