"""Workloads of the engine benchmark: requests with their arrivals. Pure and deterministic by seed.

Each repeat draws other tokens, so that no system finds prompts of an earlier repeat in its cache.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from bench.engine.peers.protocol import Request

OUTPUT_TOKENS = (32, 128, 64, 256)
PREFIX_TOKENS = 512
LONG_PROMPT_TOKENS = 8192
LONG_OUTPUT_TOKENS = 16
LONG_ARRIVAL_SECONDS = 1.0
SERVED_REQUESTS = 40
FIRST_TOKEN = 10
"""Lowest drawn token id: lower ones are special tokens."""
Tokens = Callable[[int], list[int]]


def mixed(tokens: Tokens, chance: Random, rate: float) -> list[Request]:
    """32 requests at once, prompts of 20 to 200 tokens, outputs cycling through 32, 128, 64 and 256."""
    return [Request(0.0, tokens(chance.randint(20, 200)), OUTPUT_TOKENS[number % 4]) for number in range(32)]


def brief(tokens: Tokens, chance: Random, rate: float) -> list[Request]:
    """32 requests at once, 40 tokens in and 17 out. Takes seconds, for machines that other programs often disturb."""
    return [Request(0.0, tokens(40), 17) for _ in range(32)]


def prefix(tokens: Tokens, chance: Random, rate: float) -> list[Request]:
    """32 requests at once that share 512 uncached tokens, each with 8 to 32 of its own, 32 out."""
    shared = tokens(PREFIX_TOKENS)
    return [Request(0.0, [*shared, *tokens(chance.randint(8, 32))], 32) for _ in range(32)]


def serve(tokens: Tokens, chance: Random, rate: float) -> list[Request]:
    """40 requests like those of `mixed`, in a Poisson stream."""
    now, requests = 0.0, []
    for number in range(SERVED_REQUESTS):
        requests.append(Request(now, tokens(chance.randint(20, 200)), OUTPUT_TOKENS[number % 4]))
        now += chance.expovariate(rate)
    return requests


def long(tokens: Tokens, chance: Random, rate: float) -> list[Request]:
    """16 requests that decode, 64 tokens in and 256 out, and after a second a prompt of 8,192 tokens beside them."""
    decodes = [Request(0.0, tokens(64), 256) for _ in range(16)]
    return [*decodes, Request(LONG_ARRIVAL_SECONDS, tokens(LONG_PROMPT_TOKENS), LONG_OUTPUT_TOKENS)]


def nano(tokens: Tokens, chance: Random, rate: float) -> list[Request]:
    """nano-vllm's workload: 256 requests at once, prompts and outputs of 100 to 1,024 tokens."""
    return [Request(0.0, tokens(chance.randint(100, 1024)), chance.randint(100, 1024)) for _ in range(256)]


def tiny(tokens: Tokens, chance: Random, rate: float) -> list[Request]:
    """6 requests at once, prompts of 10 to 30 tokens, 8 out: a smoke test."""
    return [Request(0.0, tokens(chance.randint(10, 30)), 8) for _ in range(6)]


WORKLOADS: dict[str, Callable[[Tokens, Random, float], list[Request]]] = {
    "mixed": mixed,
    "brief": brief,
    "prefix": prefix,
    "serve": serve,
    "long": long,
    "nano": nano,
    "tiny": tiny,
}


def requests_of(workload: str, *, vocab_size: int, rate: float, repeat: int) -> list[Request]:
    """Make the requests of one repeat. `rate` is Poisson arrivals per second. Token ids are below `vocab_size`."""
    chance = Random(f"{workload} {repeat}")

    def tokens(count: int) -> list[int]:
        return [chance.randrange(FIRST_TOKEN, vocab_size) for _ in range(count)]

    return WORKLOADS[workload](tokens, chance, rate)


def describe(workload: str, requests: Sequence[Request]) -> dict[str, Any]:
    """Describe a workload for a report, in words and in tokens."""
    text = WORKLOADS[workload].__doc__
    assert text is not None
    return {
        "about": " ".join(text.split()),
        "requests": len(requests),
        "prompt_tokens": sum(len(request.token_ids) for request in requests),
        "output_tokens": sum(request.max_tokens for request in requests),
    }
