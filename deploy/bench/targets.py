"""Targets of a benchmark: Blockyard routers over gRPC, or any server of OpenAI's HTTP API.

Owns translating a planned request into a call, and measuring the answer. Does not own the time of sending (traffic.py)
or the connection (router/client, requests/openai_server.py).
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Literal, Protocol

from blockyard.deploy.bench.measures import Sample
from blockyard.deploy.bench.workloads.requests import PlannedRequest, Workload
from blockyard.deploy.bench.workloads.spelling import Spelling, WordSpelling
from blockyard.deploy.requests.openai_server import CallFailed, OpenAIServer
from blockyard.router.client import AsyncClient, BlockyardError

Endpoint = Literal["completions", "chat"]
Send = Callable[[Sample], Awaitable[None]]
"""Sends one request and fills in its sample. A failure of the request goes into the sample; other errors are raised."""
Ask = Callable[[PlannedRequest], Send]
"""Makes the call for a request, before the request's time is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The settings that all requests of a run share."""

    seed: int
    cache_salt: str
    """Runs with different salts share no prefix."""
    temperature: float = 0.0
    policy: str | None = None


class Target(Protocol):
    """One server or cluster that is measured."""

    async def max_model_len(self) -> int | None:
        """Return the maximum tokens of prompt and output together, or None if unknown."""

    async def asking(self, workload: Workload, manner: Asking) -> Ask:
        """Draw all tokens of the workload, and return a function that prepares its requests."""

    async def flush(self) -> None:
        """Empty every cache."""

    async def promised_tokens(self) -> int | None:
        """Return the prompt tokens that the index has promised on chosen workers until now, or None if unknown."""


class BlockyardTarget:
    """Routers of a cluster, through one connection or several."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self._clients = clients

    async def max_model_len(self) -> int | None:
        return (await self._clients[0].list_models())[0].max_model_len

    async def asking(self, workload: Workload, manner: Asking) -> Ask:
        model = (await self._clients[0].list_models())[0]
        spelling = Spelling(workload.requests, vocab_size=model.vocab_size, seed=manner.seed)
        clients = cycle(self._clients)

        def ask(request: PlannedRequest) -> Send:
            return partial(send, request, spelling.prompt(request))

        async def send(request: PlannedRequest, prompt: Sequence[int], sample: Sample) -> None:
            tokens: list[int] = []
            stream = next(clients).stream(
                prompt_token_ids=prompt,
                max_tokens=request.output.length,
                ignore_eos=True,
                temperature=manner.temperature,
                seed=request.number,
                cache_salt=manner.cache_salt,
                session_id=f"bench-{request.session}" if request.session else None,
                policy=manner.policy,
            )
            try:
                async with aclosing(stream) as deltas:
                    async for delta in deltas:
                        if delta.token_ids:
                            sample.arrivals.append(time.monotonic())
                            tokens += delta.token_ids
                        if delta.finish is not None:
                            sample.prompt_tokens = delta.finish.prompt_tokens
                            sample.cached_tokens = delta.finish.cached_tokens
                            sample.worker = delta.finish.worker_id
                            sample.migrations = delta.finish.migrations
            except BlockyardError as error:
                sample.error = error.reason or error.code.name
            sample.output_tokens = len(tokens)
            spelling.answered(request.output, tokens)

        return ask

    async def flush(self) -> None:
        await self._clients[0].flush_cache()

    async def promised_tokens(self) -> int | None:
        """Return None with several connections: each router process counts for itself, and their number is unknown."""
        if len(self._clients) > 1:
            return None
        try:
            model = (await self._clients[0].list_models())[0]
            return (await self._clients[0].index_info()).promised_blocks * model.block_size
        except BlockyardError:
            return None  # The token may belong to neither a viewer nor an admin, or there is no index.


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAITarget:
    """Any server of OpenAI's API.

    Prompts are words, which have about as many tokens as planned. The server's usage gives the exact count. With a
    `vocab_size`, completions get exactly the planned number of token ids.
    """

    server: OpenAIServer
    model: str
    endpoint: Endpoint
    vocab_size: int | None = None
    ignore_eos: bool = True
    """Force answers to exactly the planned length, by vLLM's field of this name."""

    async def max_model_len(self) -> int | None:
        """Return the limit that vLLM, SGLang and Blockyard list beside the model's id, or None if it is not listed."""
        for model in await self.server.models():
            if model.get("id") == self.model and isinstance(max_model_len := model.get("max_model_len"), int):
                return max_model_len
        return None

    async def asking(self, workload: Workload, manner: Asking) -> Ask:
        seed = f"{manner.seed} {manner.cache_salt}"
        words = WordSpelling(workload.requests, seed=seed)
        ids = None
        if self.vocab_size is not None:
            ids = Spelling(workload.requests, vocab_size=self.vocab_size, seed=seed)
        path = "/v1/completions" if self.endpoint == "completions" else "/v1/chat/completions"

        def ask(request: PlannedRequest) -> Send:
            return partial(send, request, self._body(request, manner, self._prompt(request, words, ids)))

        async def send(request: PlannedRequest, body: Mapping[str, Any], sample: Sample) -> None:
            sample.worker = self.server.url.authority
            text = []
            try:
                async with aclosing(self.server.events(path, body)) as events:
                    async for event in events:
                        if piece := text_of(event):
                            sample.arrivals.append(time.monotonic())
                            text.append(piece)
                        count_usage(event, sample)
            except CallFailed as error:
                sample.error = error.reason
            if not sample.error and not sample.output_tokens:
                sample.error = "NO_USAGE" if sample.arrivals else "NO_TOKENS"
            if ids is None:
                words.answered(request.output, "".join(text))

        return ask

    def _prompt(self, request: PlannedRequest, words: WordSpelling, ids: Spelling | None) -> dict[str, Any]:
        if self.endpoint == "chat":
            said = words.messages(request)
            return {"messages": [{"role": part.role, "content": part.text} for part in said]}
        return {"prompt": words.prompt(request) if ids is None else list(ids.prompt(request))}

    def _body(self, request: PlannedRequest, manner: Asking, prompt: Mapping[str, Any]) -> dict[str, Any]:
        longest = "max_tokens" if self.endpoint == "completions" else "max_completion_tokens"
        return {
            "model": self.model,
            **prompt,
            longest: request.output.length,
            "temperature": manner.temperature,
            "seed": request.number,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }

    async def flush(self) -> None:
        """Do nothing: this API has no such call, and the command rejects --flush."""

    async def promised_tokens(self) -> int | None:
        return None


def text_of(event: Mapping[str, Any]) -> str:
    """Return the text of one event of either endpoint, including reasoning, or ""."""
    choices = event.get("choices") or ()
    parts = [choice.get("text") or "" for choice in choices]
    for delta in (choice.get("delta") or {} for choice in choices):
        parts += [str(delta.get(name) or "") for name in ("reasoning_content", "reasoning", "content")]
    return "".join(parts)


def count_usage(event: Mapping[str, Any], sample: Sample) -> None:
    usage = event.get("usage")
    if not isinstance(usage, Mapping):
        return
    sample.prompt_tokens = usage.get("prompt_tokens") or 0
    sample.output_tokens = usage.get("completion_tokens") or 0
    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
