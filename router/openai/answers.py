"""What stands round the choices of a call: id, model, time, usage; for a whole answer once, else for each chunk."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.openai.wanted import Wanted

PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-"}
WHOLE = {"chat": "chat.completion", "completions": "text_completion"}
CHUNK = {"chat": "chat.completion.chunk", "completions": "text_completion"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Of one call."""

    wanted: Wanted
    request_id: str
    model: str
    created: int
    """Unix seconds."""

    def whole(self, choices: list[dict[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._head(WHOLE), "choices": choices, "usage": usage}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        # A stream that will tell its usage says null until then.
        usage = {"usage": None} if self.wanted.includes_usage else {}
        return {**self._head(CHUNK), "choices": [choice], **usage}

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._head(CHUNK), "choices": [], "usage": usage}

    def _head(self, objects: Mapping[str, str]) -> dict[str, Any]:
        route = self.wanted.route
        return {
            "id": PREFIXES[route] + self.request_id,
            "object": objects[route],
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


def usage_of(finishes: Iterable[tuple[int, inference_pb2.Finish]], outputs_a_prompt: int) -> dict[str, Any]:
    """Of every output, by index: a prompt counts once, whatever came of it."""
    prompt_tokens = cached_tokens = completion_tokens = 0
    for index, finish in finishes:
        completion_tokens += finish.usage.completion_tokens
        if index % outputs_a_prompt == 0:
            prompt_tokens += finish.usage.prompt_tokens
            cached_tokens += finish.usage.cached_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def model_object(model: inference_pb2.Model) -> dict[str, Any]:
    """`max_model_len` is vLLM's."""
    return {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "blockyard",
        "max_model_len": model.max_model_len,
    }
