"""Requests of the soak's users: kinds of requests whose tokens are the same whenever they are asked.

Owns the kinds, their tokens in an undisturbed run, and the shape of structured output. Does not own the users or the
judgement of a stream (soak_load.py).
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.router.client import AsyncClient

from tests.system.load import CANARY, TIMEOUT_SECONDS, Stream, answers

from .redis_course import prompt

NUM_SCHEMAS = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "minItems": 12, "maxItems": 16, "items": {"enum": [1, 22, 333]}},
        "is_open": {"type": "boolean"},
    },
    "required": ["name", "sizes", "is_open"],
    "additionalProperties": False,
}
WARM_SECONDS = 60.0

Tokens = dict[int, list[int]]
"""Tokens by output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A request whose tokens are the same whenever it is asked."""

    name: str
    prompt: str
    arguments: Mapping[str, Any]
    timeout_seconds: float = TIMEOUT_SECONDS
    cancel_after_tokens: int | None = None

    def stream(self, request_id: str, *, timeout_seconds: float | None = None) -> Stream:
        return Stream(
            request_id=request_id,
            prompt=self.prompt,
            arguments={"ignore_eos": True, **self.arguments},
            timeout_seconds=timeout_seconds or self.timeout_seconds,
        )


def kinds() -> tuple[Kind, ...]:
    shared = [
        _kind("shared", number, prompt(number), max_tokens=12 + 4 * (number % 5)) for number in range(12)
    ]
    return (
        *shared,
        *(_kind("short", number, max_tokens=20 + 10 * number) for number in range(8)),
        *(_kind("two", number, max_tokens=40, n=2) for number in range(3)),
        *(_kind("logprobs", number, max_tokens=30, logprobs=2) for number in range(2)),
        *(
            _kind("schema", number, max_tokens=300, json_schema=SCHEMA, ignore_eos=False)
            for number in range(NUM_SCHEMAS)
        ),
        *(_kind("beams", number, max_tokens=20, beam_width=3, n=2) for number in range(2)),
        *(_kind("long", number, prompt(number), max_tokens=200) for number in range(2)),
        _kind("hurried", 0, timeout_seconds=0.6, max_tokens=400),
        _kind("hurried", 1, prompt(1), timeout_seconds=3.0, max_tokens=30),
        _kind("left", 0, cancel_after_tokens=0, max_tokens=100),
        _kind("left", 1, cancel_after_tokens=1, max_tokens=100),
        _kind("left", 2, prompt(2), cancel_after_tokens=20, max_tokens=100, n=2),
    )


def _kind(
    name: str,
    number: int,
    text: str = "",
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    cancel_after_tokens: int | None = None,
    **arguments: Any,
) -> Kind:
    return Kind(
        name=f"{name}{number}",
        prompt=text or f"def {name}{number:02d}(x): # {CANARY}",
        arguments={"seed": 100 + number, **arguments},
        timeout_seconds=timeout_seconds,
        cancel_after_tokens=cancel_after_tokens,
    )


async def references(client: AsyncClient, wanted: Sequence[Kind]) -> dict[str, Tokens]:
    """Return the tokens of each kind in an undisturbed run."""
    streams = [kind.stream(f"reference-{kind.name}", timeout_seconds=TIMEOUT_SECONDS) for kind in wanted]
    for stream in await answers(client, streams):
        assert stream.error is None, f"{stream.request_id}: {stream.error}"
    return {kind.name: stream.tokens for kind, stream in zip(wanted, streams, strict=True)}


async def warm_grammars(client: AsyncClient, workers: Collection[str], wanted: Sequence[Kind]) -> None:
    """Ask until each worker has followed a grammar. The first one makes a worker load its grammar code, which is no
    leak."""
    missing, began = set(workers), time.monotonic()
    structured = [kind for kind in wanted if "json_schema" in kind.arguments]
    while missing:
        assert time.monotonic() - began < WARM_SECONDS, f"no grammar came to {missing}"
        streams = [kind.stream(f"warm-{kind.name}-{time.monotonic_ns()}") for kind in structured]
        for stream in await answers(client, streams):
            missing -= {stream.finish.worker_id} if stream.finish is not None else set()


def malformed(stream: Stream) -> list[str]:
    """Return the outputs that are not JSON of the schema's shape."""
    found = []
    for index, text in stream.text.items():
        try:
            keys = set(json.loads(text))
        except (ValueError, TypeError):
            keys = set()
        if keys != set(SCHEMA["required"]):
            found.append(f"{stream.request_id}: output {index} does not follow its schema")
    return found
