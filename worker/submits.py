"""What a router's Submit asks of the engine.

Routers check all of it too, and say it better. It is checked again here because the engine may run nothing that could
harm others, whoever sent it. Owns defaults of fields that older routers leave out. Does not own capacity (the
scheduler) nor whether a structured output can be compiled (the grammar's compiler).
"""

import math
from collections.abc import Iterable, Iterator

from blockyard.proto.block_hash import NAME_BYTES, split_names, unpack_tokens
from blockyard.proto.v1 import inference_pb2
from blockyard.proto.v1.session_pb2 import EngineSampling, RejectReason, Submit
from blockyard.worker.engine_types import Continuation, EngineRequest
from blockyard.worker.sequence import BlockName, EarlyStopping, SamplingParams

MAX_PRIORITY = 100
"""Either sign."""
MAX_LIST = {
    "stop_token_ids": 64,
    "eos_token_ids": 64,
    "bad_token_ids": 1024,
    "logit_bias": 1024,
    "allowed_token_ids": 65_536,
}
"""Entries; the public API has the same bounds."""
_EARLY_STOPPING: dict[int, EarlyStopping] = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: "heuristic",
    inference_pb2.EARLY_STOPPING_HEURISTIC: "heuristic",
    inference_pb2.EARLY_STOPPING_FIRST: "first",
    inference_pb2.EARLY_STOPPING_NEVER: "never",
}


class Refused(Exception):
    """A submit that will not run, and why."""

    def __init__(self, reason: RejectReason) -> None:
        super().__init__(RejectReason.Name(reason))
        self.reason = reason


def engine_request(submit: Submit, *, vocab_size: int, block_size: int) -> EngineRequest:
    """Without the compiled grammar. Raises ValueError for anything that a router of ours would not send."""
    token_ids = unpack_tokens(submit.token_ids)
    if not token_ids:
        raise ValueError("a prompt of no tokens")
    continuations = tuple(
        Continuation(index=part.index, token_ids=tuple(unpack_tokens(part.token_ids)))
        for part in submit.continuations
    )
    _check_tokens(token_ids, vocab_size)
    _check_tokens((token for part in continuations for token in part.token_ids), vocab_size)
    _check_tokens(_named_tokens(submit.sampling), vocab_size)
    names = [BlockName(name) for name in split_names(submit.block_names)]
    if not 1 <= len(names) <= 1 + submit.prompt_tokens // block_size:
        raise ValueError(f"{len(names)} names of {NAME_BYTES} bytes for {submit.prompt_tokens} tokens")
    if not abs(submit.priority) <= MAX_PRIORITY:
        raise ValueError(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {submit.priority}")
    if not 0 <= submit.deadline_seconds < math.inf:
        raise ValueError(f"deadline_seconds must not be negative, not {submit.deadline_seconds}")
    return EngineRequest(
        token_ids=token_ids,
        prompt_length=submit.prompt_tokens,
        names=names,
        sampling=_sampling(submit.sampling),
        deadline_seconds=submit.deadline_seconds or None,
        priority=submit.priority,
        continuations=continuations,
    )


def _check_tokens(token_ids: Iterable[int], vocab_size: int) -> None:
    if not all(0 <= token < vocab_size for token in token_ids):
        raise ValueError(f"token ids must be from 0 to {vocab_size - 1}")


def _named_tokens(sampling: EngineSampling) -> Iterator[int]:
    """Every token id in it: each becomes a place in the logits."""
    yield from sampling.stop_token_ids
    yield from sampling.eos_token_ids
    yield from sampling.allowed_token_ids
    yield from sampling.bad_token_ids
    yield from sampling.logit_bias


def _sampling(sampling: EngineSampling) -> SamplingParams:
    if sampling.early_stopping not in _EARLY_STOPPING:
        raise ValueError(f"early_stopping {sampling.early_stopping} is unknown")
    if sampling.HasField("structured_output"):
        _check_structured(sampling)
    for name, limit in MAX_LIST.items():
        if len(getattr(sampling, name)) > limit:
            raise ValueError(f"{name} may have {limit} entries")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=frozenset(sampling.allowed_token_ids),
        bad_token_ids=frozenset(sampling.bad_token_ids),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        eos_token_ids=frozenset(sampling.eos_token_ids),
        n=sampling.n or 1,
        beam_width=sampling.beam_width,
        length_penalty=sampling.length_penalty,
        early_stopping=_EARLY_STOPPING[sampling.early_stopping],
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def _check_structured(sampling: EngineSampling) -> None:
    """The output ends where the grammar is complete, and nowhere else."""
    if sampling.beam_width or sampling.min_tokens or not sampling.structured_output.WhichOneof("kind"):
        raise ValueError("a structured output has a kind, no beams and no min_tokens")
