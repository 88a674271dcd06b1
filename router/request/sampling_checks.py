"""Checks of sampling parameters. They report all problems at once, by field, and quote nothing that the client sent.

Owns which fields exclude one another. protobuf lets NaN and any number through, so each is checked here. Counts come
first: nothing is copied or read that is longer than allowed. Does not own ranges and counts (proto/limits.py) or
defaults (sampling.py).
"""

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.proto.limits import (
    COUNTS,
    MAX_BAD_WORD_CHARS,
    MAX_LOGIT_BIAS,
    MAX_OUTPUT_TOKENS,
    MAX_STOP_CHARS,
    RANGES,
)
from blockyard.proto.v1 import inference_pb2
from blockyard.router.config import DEFAULT_MAX_BEAM_WIDTH, DEFAULT_MAX_OUTPUTS
from blockyard.router.errors import FieldViolation, InvalidRequest
from blockyard.router.request.sampling import is_greedy
from blockyard.router.request.structured_output import structured_problem
from blockyard.router.tokenizing.model_facts import ModelFacts

TOKEN_FIELDS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_token_ids")

Problem = tuple[str, str]
"""A wrong field of SamplingParams, and what is allowed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """The most outputs and beams of one request on this router."""

    max_outputs: int = DEFAULT_MAX_OUTPUTS
    max_beam_width: int = DEFAULT_MAX_BEAM_WIDTH


def sampling_violations(
    message: inference_pb2.SamplingParams, facts: ModelFacts, limits: SamplingLimits
) -> list[FieldViolation]:
    countable = {field for field, limit in COUNTS.items() if len(getattr(message, field)) <= limit}
    problems = [
        *_out_of_range(message, limits),
        *_bad_lists(message, facts, countable),
        *_bad_lengths(message),
        *(_no_token_left(message, facts) if countable.issuperset(TOKEN_FIELDS) else ()),
        *_excluded_by_beams(message),
        *_structured(message),
    ]
    return [FieldViolation(field=f"sampling.{field}", description=text) for field, text in problems]


def _out_of_range(message: inference_pb2.SamplingParams, limits: SamplingLimits) -> Iterator[Problem]:
    ranges = {**RANGES, "n": (1, limits.max_outputs), "beam_width": (1, limits.max_beam_width)}
    for field, (lowest, highest) in ranges.items():
        # NaN is in no range. A float32 cannot hold 0.01 exactly, so the bound is rounded likewise.
        if message.HasField(field) and not _float32(lowest) <= getattr(message, field) <= highest:
            yield field, f"must be a number from {lowest} to {highest}"
    if message.HasField("top_p") and not 0 < message.top_p <= 1:
        yield "top_p", "must be above 0 and at most 1"
    if message.early_stopping not in inference_pb2.EarlyStopping.values():
        yield "early_stopping", "must be one of the values of EarlyStopping"


def _bad_lists(
    message: inference_pb2.SamplingParams, facts: ModelFacts, countable: Collection[str]
) -> Iterator[Problem]:
    """Yield the problems of repeated fields. Only the elements of the `countable` ones, which have no more of them than
    allowed, are read."""

    def elements(field: str) -> Iterable[Any]:
        return getattr(message, field) if field in countable else ()

    for field, limit in COUNTS.items():
        if field not in countable:
            yield field, f"at most {limit} are allowed"
    for field in TOKEN_FIELDS:
        if any(token_id >= facts.vocab_size for token_id in elements(field)):
            yield field, "each must be a token id of the model"
    if "logit_bias" in countable and not all(
        -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS for bias in message.logit_bias.values()
    ):
        yield "logit_bias", f"each must be a number from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
    if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in elements("stop")):
        yield "stop", f"each must have 1 to {MAX_STOP_CHARS} characters"
    if not all(_is_bad_word(word) for word in elements("bad_words")):
        yield "bad_words", f"each must have 1 to {MAX_BAD_WORD_CHARS} characters, not spaces alone"


def ban_words(message: inference_pb2.SamplingParams, encode: Callable[[str], Sequence[int]]) -> None:
    """Add the tokens of `bad_words` to the message's `bad_token_ids`, since the engine forbids only single tokens.

    Raises InvalidRequest for a word of several tokens: to forbid each of them would forbid other words too. Words that
    are too many, too long or empty are left to `sampling_violations`.
    """
    if len(message.bad_words) > COUNTS["bad_words"] or not all(map(_is_bad_word, message.bad_words)):
        return
    banned: set[int] = set()
    for word in message.bad_words:
        # As in vLLM: at the beginning of a text, and after a space.
        alone, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        if len(alone) != 1 or not (len(spaced) == 1 or alone[0] in spaced):
            raise InvalidRequest.of(
                "sampling.bad_words", "each must be one token of the model, alone and behind a space"
            )
        banned |= {alone[0], spaced[0]} if len(spaced) == 1 else {alone[0]}
    message.bad_token_ids.extend(sorted(banned.difference(message.bad_token_ids)))


def _is_bad_word(word: str) -> bool:
    return len(word) <= MAX_BAD_WORD_CHARS and bool(word.strip())


def _bad_lengths(message: inference_pb2.SamplingParams) -> Iterator[Problem]:
    if message.min_tokens > (message.max_tokens if message.HasField("max_tokens") else MAX_OUTPUT_TOKENS):
        yield "min_tokens", "must be at most max_tokens"
    if message.HasField("beam_width") and message.beam_width < message.n:
        yield "beam_width", "must be at least n"


def _no_token_left(message: inference_pb2.SamplingParams, facts: ModelFacts) -> Iterator[Problem]:
    """Yield a problem if the lists of tokens leave no token to sample, or only ones that end the output before
    min_tokens."""
    ends = set(message.stop_token_ids) | (frozenset() if message.ignore_eos else facts.eos_token_ids)
    if not _leaves_any(message, facts, set(message.bad_token_ids)):
        field = "allowed_token_ids" if message.allowed_token_ids else "bad_token_ids"
        yield field, "bad_token_ids must leave an allowed token"
    elif message.min_tokens and not _leaves_any(message, facts, ends | set(message.bad_token_ids)):
        yield "min_tokens", "cannot be reached: every allowed token would end the output"


def _leaves_any(message: inference_pb2.SamplingParams, facts: ModelFacts, without: set[int]) -> bool:
    if message.allowed_token_ids:
        return any(token_id not in without for token_id in message.allowed_token_ids)
    return sum(token_id < facts.vocab_size for token_id in without) < facts.vocab_size


def _excluded_by_beams(message: inference_pb2.SamplingParams) -> Iterator[Problem]:
    if not message.HasField("beam_width"):
        return
    given = {
        "temperature": message.HasField("temperature") and not is_greedy(message),
        "top_k": message.top_k > 0,
        "top_p": message.HasField("top_p") and message.top_p != 1,
        "min_p": message.min_p != 0,
        "presence_penalty": message.presence_penalty != 0,
        "frequency_penalty": message.frequency_penalty != 0,
        "repetition_penalty": message.HasField("repetition_penalty") and message.repetition_penalty != 1,
        "logit_bias": bool(message.logit_bias),
        "allowed_token_ids": bool(message.allowed_token_ids),
        "bad_token_ids": bool(message.bad_token_ids),
        "stop": bool(message.stop),
        "logprobs": message.HasField("logprobs"),
        "prompt_logprobs": message.HasField("prompt_logprobs"),
        "structured_output": message.HasField("structured_output"),
    }
    yield from ((field, "is not allowed with beam search") for field, is_given in given.items() if is_given)


def _structured(message: inference_pb2.SamplingParams) -> Iterator[Problem]:
    if not message.HasField("structured_output"):
        return
    problem = structured_problem(message.structured_output)
    if problem is not None:
        yield "structured_output", problem
    if message.ignore_eos:
        yield "ignore_eos", "is not allowed with structured output, which ends when it is complete"
    if message.min_tokens:
        yield "min_tokens", "is not allowed with structured output, which ends when it is complete"


def _float32(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])
