"""What stands round the choices of a call: id, model, time, usage; for a whole answer once, else for each chunk."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.openai.wanted import Wanted

PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-"}
WHOLE = {"chat": "chat.completion", "completions": "text_completion"}
CHUNK = {"chat": "chat.completion.chunk", "completions": "text_completion"}


class Usage:
    """Tokens of one call, added up as its outputs come: a prompt counts once, whatever came of it."""

    def __init__(self, outputs_a_prompt: int) -> None:
        self._outputs_a_prompt = outputs_a_prompt
        self._prompts: dict[int, tuple[int, int]] = {}
        """Of each: its tokens, and how many were cached."""
        self._completion_tokens = 0

    def add(self, index: int, *, prompt_tokens: int, cached_tokens: int, new_tokens: int) -> None:
        """`new_tokens` of the output at `index`."""
        self._prompts[index // self._outputs_a_prompt] = prompt_tokens, cached_tokens
        self._completion_tokens += new_tokens

    def read(self) -> dict[str, Any]:
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }


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

    def chunk(self, choice: dict[str, Any], usage: Usage) -> dict[str, Any]:
        answering = self.wanted.answering
        if not answering.includes_usage:
            return {**self._head(CHUNK), "choices": [choice]}
        # A stream that will tell its usage says null until then.
        so_far = usage.read() if answering.continuous_usage else None
        return {**self._head(CHUNK), "choices": [choice], "usage": so_far}

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


def model_object(model: inference_pb2.Model) -> dict[str, Any]:
    """`max_model_len` is vLLM's."""
    return {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "blockyard",
        "max_model_len": model.max_model_len,
    }
