"""Results of the clients: deltas of a stream, whole outputs, completions (all outputs of a request) and embeddings.

Pure values. stream_check.py checks that no token is lost or doubled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockyard.proto.v1 import inference_pb2

FinishReason = Literal["stop", "length", "unspecified"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How an output ended, with its token counts and times."""

    reason: FinishReason
    stop_reason: str | None
    """The stop string that ended the output, or the stop token's id in decimal."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the worker reused."""
    seed: int
    time_to_first_token_seconds: float
    total_seconds: float
    worker_id: str
    cumulative_logprob: float | None = None
    """Sum of its tokens' log-probabilities. Present with n > 1, logprobs or beams."""
    beam_score: float | None = None
    """Score by which beams are ranked. None without beams."""
    migrations: int = 0
    """How often the request's worker was lost or failed, and the request continued elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The model's log-probability of a token, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int
    """Place of the token among all by likelihood. 1 is the most likely."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, in order, as many as were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One piece of a streamed output. Its last one carries `finish`."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    token_offset: int
    """Number of tokens of this output before token_ids[0]. The client has checked that none is missing."""
    finish: Finish | None
    index: int = 0
    """Number of the output, from 0 to n - 1."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token, if asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token of the prompt except the first. With the first delta of output 0, if asked for."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt's tokens. With the first delta of each output, if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One whole output of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole result of a request. Text, tokens and finish are those of the first output."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    outputs: tuple[Output, ...]
    """All outputs in order of index; for beams, the best first."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt's tokens as the model received them, if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The embedding of a text, with the request's token counts and times."""

    request_id: str
    values: tuple[float, ...]
    """The numbers of the embedding. They are float32."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the worker reused."""
    total_seconds: float
    worker_id: str
    migrations: int = 0
    """How often the request's worker was lost or failed, and the request continued elsewhere."""


def embedding(response: inference_pb2.EmbedResponse) -> Embedding:
    return Embedding(
        request_id=response.request_id,
        values=tuple(response.embedding),
        prompt_tokens=response.usage.prompt_tokens,
        cached_tokens=response.usage.cached_tokens,
        total_seconds=response.timing.total_seconds,
        worker_id=response.worker_id,
        migrations=response.migrations,
    )


def completion(deltas: Sequence[Delta]) -> Completion:
    """Join all deltas of one finished stream into the request's result."""
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    outputs = tuple(_output(by_index[index]) for index in sorted(by_index))
    first = outputs[0]
    return Completion(
        request_id=deltas[-1].request_id,
        text=first.text,
        token_ids=first.token_ids,
        finish=first.finish,
        outputs=outputs,
        prompt_logprobs=tuple(token for delta in deltas for token in delta.prompt_logprobs),
        prompt_token_ids=next((delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids), ()),
    )


def _output(deltas: Sequence[Delta]) -> Output:
    finish = deltas[-1].finish
    assert finish is not None, "a finished output ends with its finish"
    return Output(
        index=deltas[-1].index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish=finish,
        logprobs=tuple(token for delta in deltas for token in delta.logprobs),
    )
