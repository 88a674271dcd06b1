"""Submits: what a router's Submit asks of the engine, checked.

Routers check all of it too, with better messages. It is checked again here because no sender may make the engine harm
others. Lengths come first: nothing is unpacked that is longer than this engine could use. Owns defaults of fields that
older routers leave out. Does not own capacity (the scheduler) or whether a structured output can be compiled
(../grammar/).
"""

import math
import re
from collections.abc import Iterator, Sequence

from blockyard.proto.limits import COUNTS, MAX_PAUSE_SECONDS, MAX_PRIORITY
from blockyard.proto.naming.block_hash import NAME_BYTES, TOKEN_BYTES, chain, split_names, unpack_tokens
from blockyard.proto.naming.identifiers import is_name
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.proto.v1.session_pb2 import EngineSampling, RejectReason, Submit
from blockyard.worker.engine_types import Continuation, EngineRequest
from blockyard.worker.scheduling.pulls import PullOrder
from blockyard.worker.sequences.identifiers import BlockName, TenantId
from blockyard.worker.sequences.sampling_params import EarlyStopping, SamplingParams

MAX_LIST = {
    **{name: COUNTS[name] for name in ("stop_token_ids", "bad_token_ids", "logit_bias", "allowed_token_ids")},
    "eos_token_ids": 64,
}
"""Maximum entries of each list, by its field."""
MAX_CONTINUATIONS = 4096
"""More than any engine has sequence slots, which are the real bound."""
_EARLY_STOPPING: dict[int, EarlyStopping] = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: "heuristic",
    inference_pb2.EARLY_STOPPING_HEURISTIC: "heuristic",
    inference_pb2.EARLY_STOPPING_FIRST: "first",
    inference_pb2.EARLY_STOPPING_NEVER: "never",
}

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")


class Refused(Exception):
    """A submit that will not run, and the reason."""

    def __init__(self, reason: RejectReason) -> None:
        super().__init__(RejectReason.Name(reason))
        self.reason = reason


def engine_request(submit: Submit, *, vocab_size: int, block_size: int, max_model_len: int) -> EngineRequest:
    """Return the request of a submit, without its compiled grammar. Raises ValueError for what none of our routers
    would send."""
    _check_lengths(submit, block_size, max_model_len)
    token_ids = unpack_tokens(submit.token_ids)
    if not token_ids:
        raise ValueError("the prompt has no tokens")
    continuations = tuple(
        Continuation(index=part.index, token_ids=tuple(unpack_tokens(part.token_ids)))
        for part in submit.continuations
    )
    for tokens in (token_ids, *(part.token_ids for part in continuations), *_named_tokens(submit.sampling)):
        _check_tokens(tokens, vocab_size)
    if not abs(submit.priority) <= MAX_PRIORITY:
        raise ValueError(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {submit.priority}")
    if not 0 <= submit.deadline_seconds < math.inf:
        raise ValueError(f"deadline_seconds must not be negative, not {submit.deadline_seconds}")
    if not 0 <= submit.expected_pause_seconds <= MAX_PAUSE_SECONDS:
        raise ValueError(
            f"expected_pause_seconds must be from 0 to {MAX_PAUSE_SECONDS}, not {submit.expected_pause_seconds}"
        )
    return EngineRequest(
        token_ids=token_ids,
        prompt_length=submit.prompt_tokens,
        names=_names(submit, block_size),
        sampling=_sampling(submit.sampling),
        deadline_seconds=submit.deadline_seconds or None,
        priority=submit.priority,
        tenant=TenantId(submit.tenant),
        client=submit.client,
        adapter=_fingerprint(submit.lora_fingerprint),
        continuations=continuations,
        pull=_pull(submit.pull) if submit.HasField("pull") else None,
        preemptions=submit.preemptions if submit.HasField("preemptions") else None,
        expected_pause_seconds=submit.expected_pause_seconds,
    )


def _fingerprint(text: str) -> str:
    if text and not _FINGERPRINT.fullmatch(text):
        raise ValueError("lora_fingerprint must have 32 hexadecimal digits")
    return text


def _pull(pull: session_pb2.Pull) -> PullOrder:
    if not 0 <= pull.seconds < math.inf:
        raise ValueError(f"the seconds of a pull must not be negative, not {pull.seconds}")
    return PullOrder(
        address=pull.address,
        incarnation=pull.incarnation,
        num_blocks=pull.num_blocks,
        seconds=pull.seconds,
    )


def _check_lengths(submit: Submit, block_size: int, max_model_len: int) -> None:
    if not is_name(submit.request_id):
        raise ValueError("request_id is not one that a router accepts")
    if submit.prompt_tokens > max_model_len:
        raise ValueError(
            f"prompt_tokens {submit.prompt_tokens} exceeds the context of {max_model_len} tokens"
        )
    if len(submit.continuations) > MAX_CONTINUATIONS:
        raise ValueError(f"{len(submit.continuations)} continuations, at most {MAX_CONTINUATIONS}")
    for packed in (submit.token_ids, *(part.token_ids for part in submit.continuations)):
        if len(packed) > max_model_len * TOKEN_BYTES:
            raise ValueError(f"{len(packed)} bytes of tokens exceed the context of {max_model_len} tokens")
    if len(submit.block_names) > NAME_BYTES * (1 + submit.prompt_tokens // block_size):
        raise ValueError(
            f"{len(submit.block_names)} bytes of block_names are too many for {submit.prompt_tokens} tokens"
        )
    for name, limit in MAX_LIST.items():
        if len(getattr(submit.sampling, name)) > limit:
            raise ValueError(f"{name} must have at most {limit} entries")


def _names(submit: Submit, block_size: int) -> list[BlockName]:
    """Return the names of the prompt's blocks, each checked against the name before it and its block's tokens.

    Other requests read what is stored under a name, so a wrong name would give them wrong content. The root alone
    cannot be checked: only routers know which prefix it stands for.
    """
    names = split_names(submit.block_names)
    if not names:
        raise ValueError("block_names is empty: it must begin with the root's name")
    named_bytes = (len(names) - 1) * block_size * TOKEN_BYTES
    if names[1:] != chain(names[0], submit.token_ids[:named_bytes], block_size):
        raise ValueError("block_names do not match the prompt's blocks")
    return [BlockName(name) for name in names]


def _check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(f"token ids must be from 0 to {vocab_size - 1}")


def _named_tokens(sampling: EngineSampling) -> Iterator[Sequence[int]]:
    """Yield the lists of token ids in the sampling. Each id becomes an index into the logits."""
    yield sampling.stop_token_ids
    yield sampling.eos_token_ids
    yield sampling.allowed_token_ids
    yield sampling.bad_token_ids
    yield list(sampling.logit_bias)


def _sampling(sampling: EngineSampling) -> SamplingParams:
    if sampling.early_stopping not in _EARLY_STOPPING:
        raise ValueError(f"early_stopping {sampling.early_stopping} is unknown")
    if sampling.HasField("structured_output"):
        _check_structured(sampling)
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
        embeds=sampling.embeds,
    )


def _check_structured(sampling: EngineSampling) -> None:
    """Raise ValueError for a structured output without a kind, with beams, or with min_tokens."""
    if sampling.beam_width or sampling.min_tokens or not sampling.structured_output.WhichOneof("kind"):
        raise ValueError("a structured output needs a kind, and takes no beams and no min_tokens")
