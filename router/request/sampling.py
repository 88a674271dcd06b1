"""Sampling parameters: turns a client's message into the engine's, with all defaults filled in.

Owns defaults. Takes valid messages only (sampling_checks.py).
"""

import secrets
from dataclasses import dataclass, replace

from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.tokenizing.model_facts import ModelFacts, SamplingDefaults

GREEDY_BELOW = 1e-5
"""A lower temperature means greedy: logits divided by it overflow."""
LEAST_ENGINE_PENALTY = 0.01 + 1e-8
"""Rounded up: as a float32, 0.01 is a little less than 0.01, and the engine would refuse it."""
SEED_BITS = 63
NEUTRAL = SamplingDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Valid sampling parameters. `for_engine` applies limits that depend on the prompt's length."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: frozenset[int]
    """The only tokens that may be sampled. Empty: all may."""
    bad_token_ids: frozenset[int]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop_in_output: bool
    skip_special_tokens: bool
    logprobs: int | None
    """Number of top tokens that the client gets with each token's log-probability. None: no log-probabilities."""
    prompt_logprobs: int | None
    n: int
    beam_width: int
    """Number of beams. 0: sample instead of searching."""
    length_penalty: float
    early_stopping: inference_pb2.EarlyStopping
    structured_output: inference_pb2.StructuredOutput | None
    embeds: bool = False
    """Whether the request wants the prompt's embedding, and no token."""

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that the engine runs at once."""
        return max(self.n, self.beam_width)

    @property
    def wants_score(self) -> bool:
        """Return True if the client gets the summed log-probability of each output."""
        return self.n > 1 or self.logprobs is not None or self.beam_width > 0

    def for_engine(self, *, room_tokens: int, facts: ModelFacts) -> session_pb2.EngineSampling:
        """Return the engine's parameters. `room_tokens`, the context's room after the prompt, caps each output."""
        max_tokens = room_tokens if self.max_tokens is None else min(self.max_tokens, room_tokens)
        # The router sums the log-probabilities of a sampled output (assembly.py), the engine those of a beam.
        summed = 0 if self.wants_score and not self.beam_width else None
        return session_pb2.EngineSampling(
            temperature=self.temperature,
            top_k=self.top_k if self.top_k < facts.vocab_size else 0,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=max(self.repetition_penalty, LEAST_ENGINE_PENALTY),
            logit_bias=dict(self.logit_bias),
            allowed_token_ids=sorted(self.allowed_token_ids),
            bad_token_ids=sorted(self.bad_token_ids),
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            seed=self.seed,
            stop_token_ids=sorted(self.stop_token_ids),
            eos_token_ids=() if self.ignore_eos else sorted(facts.eos_token_ids),
            logprobs=summed if self.logprobs is None else self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            n=self.n,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            structured_output=self.structured_output,
            embeds=self.embeds,
        )


def parse_sampling(
    message: inference_pb2.SamplingParams, model_defaults: SamplingDefaults = NEUTRAL
) -> SamplingRequest:
    """Return the parameters of a message without `sampling_violations`, with defaults for those it lacks.

    A missing seed is drawn at random. Beam search ignores the model's defaults.
    """
    stopping = message.early_stopping
    defaults = NEUTRAL if message.beam_width else model_defaults
    return SamplingRequest(
        temperature=_temperature(message, defaults),
        top_k=message.top_k if message.HasField("top_k") else defaults.top_k,
        top_p=message.top_p if message.HasField("top_p") else defaults.top_p,
        min_p=message.min_p if message.HasField("min_p") else defaults.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=(
            message.repetition_penalty
            if message.HasField("repetition_penalty")
            else defaults.repetition_penalty
        ),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=frozenset(message.allowed_token_ids),
        bad_token_ids=frozenset(message.bad_token_ids),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        seed=message.seed if message.HasField("seed") else secrets.randbits(SEED_BITS),
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        include_stop_in_output=message.include_stop_in_output,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        n=message.n if message.HasField("n") else 1,
        beam_width=message.beam_width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=stopping or inference_pb2.EARLY_STOPPING_HEURISTIC,
        structured_output=message.structured_output if message.HasField("structured_output") else None,
    )


def is_greedy(message: inference_pb2.SamplingParams) -> bool:
    """Return True if the client explicitly asks for greedy decoding."""
    return message.HasField("temperature") and message.temperature < GREEDY_BELOW


def _temperature(message: inference_pb2.SamplingParams, defaults: SamplingDefaults) -> float:
    temperature = message.temperature if message.HasField("temperature") else defaults.temperature
    return 0.0 if message.beam_width or temperature < GREEDY_BELOW else temperature


EMBEDDING = replace(parse_sampling(inference_pb2.SamplingParams(max_tokens=0, seed=0)), embeds=True)
"""Sampling parameters of a request for an embedding, which samples nothing."""
PREFETCH = parse_sampling(inference_pb2.SamplingParams(temperature=0, max_tokens=1, seed=0))
"""The sampling of a request that generates nothing. The engine still makes one token, which is dropped."""
