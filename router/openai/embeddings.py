"""Embeddings: answers a checked call of /v1/embeddings. Each input is a request of its own."""

import asyncio
from base64 import b64encode
from typing import Any

from blockyard.proto.runtime.logs import REQUEST_ID
from blockyard.router.calls.generating import Calls
from blockyard.router.errors import InvalidRequest
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.generation.embedding import Embedding, sized
from blockyard.router.openai.answers.outputs import outputs
from blockyard.router.openai.http.call import HttpCall
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.requests.embedding import WantedEmbeddings
from blockyard.router.openai.requests.prompts import set_ids

MAX_NUMBERS = 2**22
"""Most numbers of one answer: 2048 embeddings of 2048 numbers, about 80 MB of text."""


async def embeddings(calls: Calls, wanted: WantedEmbeddings, call: HttpCall, request_id: str) -> bytes:
    """Run one call and return its answer as JSON. Raises RouterErrors, also in groups."""
    facts = calls.groups.of(wanted.requests[0].model).parts.facts
    size = min(wanted.dimensions or facts.embedding_size, facts.embedding_size)
    if len(wanted.requests) * size > MAX_NUMBERS:
        raise InvalidRequest.of(
            "input",
            f"has {len(wanted.requests)} inputs with {size} numbers each: an answer has up to {MAX_NUMBERS}",
        )
    set_ids(wanted.requests, request_id)
    REQUEST_ID.set(request_id)
    found: dict[int, Delta] = {}

    def take(delta: Delta) -> None:
        found[delta.index] = delta

    async with outputs(calls, wanted.requests, call) as run:
        await run(take)
    if facts.pooling is None:
        raise RuntimeError("a model that generates has been refused")
    items = []
    for index in range(len(found)):
        embedding = sized(found[index].embedding, wanted.dimensions, facts.pooling)
        value = _base64(embedding) if wanted.is_base64 else embedding.tolist()
        items.append(encoded({"object": "embedding", "index": index, "embedding": value}))
        # A call may have 2048 embeddings of thousands of numbers. Other calls take their turns between them.
        await asyncio.sleep(0)
    head = encoded({"object": "list", "model": facts.name, "usage": _usage(list(found.values()))})
    return head[:-1] + b',"data":[' + b",".join(items) + b"]}"


def _base64(embedding: Embedding) -> str:
    return b64encode(embedding.astype("<f4", copy=False).tobytes()).decode()


def _usage(deltas: list[Delta]) -> dict[str, Any]:
    tokens = sum(delta.prompt_tokens for delta in deltas)
    cached_tokens = sum(delta.cached_tokens for delta in deltas)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
