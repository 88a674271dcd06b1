"""Sampling parameters: from what a client sent to what the engine gets, with every default filled in.

Owns ranges and defaults. protobuf lets NaN and any number through, so each is checked here, all at once, by
field.
"""

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.errors import FieldViolation
from blockyard.router.model_facts import ModelFacts

MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-5
"""Logits divided by less overflow: such a temperature means greedy."""
MAX_MAX_TOKENS = 2**24
"""No context is longer: more is a mistake rather than a wish for "all there is"."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Valid by itself; limits that depend on the prompt's length are applied by `for_engine`."""

    temperature: float
    top_k: int
    top_p: float
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]

    def for_engine(self, *, room_tokens: int, facts: ModelFacts) -> session_pb2.EngineSampling:
        """`room_tokens` is what the context leaves after the prompt: longer outputs are capped at it."""
        max_tokens = room_tokens if self.max_tokens is None else min(self.max_tokens, room_tokens)
        return session_pb2.EngineSampling(
            temperature=self.temperature,
            top_k=self.top_k if self.top_k < facts.vocab_size else 0,
            top_p=self.top_p,
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            seed=self.seed,
            stop_token_ids=sorted(self.stop_token_ids),
            eos_token_ids=() if self.ignore_eos else sorted(facts.eos_token_ids),
        )


def parse_sampling(
    message: inference_pb2.SamplingParams, facts: ModelFacts
) -> tuple[SamplingRequest, list[FieldViolation]]:
    """The parameters and everything that is wrong with them; they are for use only where nothing is."""
    temperature = message.temperature if message.HasField("temperature") else 1.0
    sampling = SamplingRequest(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        seed=message.seed if message.HasField("seed") else secrets.randbits(SEED_BITS),
        stop=tuple(message.stop[: MAX_STOP_STRINGS + 1]),
        stop_token_ids=frozenset(message.stop_token_ids[: MAX_STOP_TOKEN_IDS + 1]),
    )
    checks = (
        (
            "temperature",
            math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE,
            f"must be a number from 0 to {MAX_TEMPERATURE:g}",
        ),
        ("top_p", 0 < sampling.top_p <= 1, "must be above 0 and at most 1"),
        (
            "max_tokens",
            sampling.max_tokens is None or 1 <= sampling.max_tokens <= MAX_MAX_TOKENS,
            f"must be from 1 to {MAX_MAX_TOKENS}",
        ),
        ("min_tokens", _min_tokens_fit(sampling), "must be at most max_tokens"),
        ("stop", len(message.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} are allowed"),
        (
            "stop",
            all(1 <= len(stop) <= MAX_STOP_CHARS for stop in sampling.stop),
            f"each must have 1 to {MAX_STOP_CHARS} characters",
        ),
        (
            "stop_token_ids",
            len(message.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"at most {MAX_STOP_TOKEN_IDS} are allowed",
        ),
        (
            "stop_token_ids",
            all(token_id < facts.vocab_size for token_id in sampling.stop_token_ids),
            "each must be a token id of the model",
        ),
        (
            "min_tokens",
            not sampling.min_tokens or not _covers_vocabulary(sampling, facts),
            "cannot be reached: every token would end the output",
        ),
    )
    return sampling, list(_violations(checks))


def _violations(checks: Iterable[tuple[str, bool, str]]) -> Iterable[FieldViolation]:
    for field, holds, description in checks:
        if not holds:
            yield FieldViolation(field=f"sampling.{field}", description=description)


def _min_tokens_fit(sampling: SamplingRequest) -> bool:
    return sampling.min_tokens <= (MAX_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens)


def _covers_vocabulary(sampling: SamplingRequest, facts: ModelFacts) -> bool:
    ends = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | facts.eos_token_ids
    return len(ends) >= facts.vocab_size
