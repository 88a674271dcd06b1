"""The engine receives every option of a Submit, and a message that our routers never send is refused."""

import math
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.v1 import inference_pb2
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.proto.v1.session_pb2 import EngineSampling, Submit
from blockyard.worker.engine_types import Continuation, EngineRequest
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.session.submits import engine_request

from .scheduling import ROOT

VOCAB_SIZE = 100
CONTEXT = 64
PROMPT = [5] * 20
LEAST: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 6, "length_penalty": 1.0}


def parse(*, sampling: dict[str, Any] | None = None, **changes: Any) -> EngineRequest:
    values = {
        "token_ids": pack_tokens(PROMPT),
        "prompt_tokens": len(PROMPT),
        "block_names": b"".join((ROOT, *chain(ROOT, PROMPT, 16))),
        "sampling": EngineSampling(**(LEAST | (sampling or {}))),
    }
    submit = Submit(**(values | changes))
    return engine_request(
        Submit.FromString(submit.SerializeToString()),
        vocab_size=VOCAB_SIZE,
        block_size=16,
        max_model_len=CONTEXT,
    )


def test_every_option_arrives() -> None:
    as_sent = {
        "top_k": 7,
        "min_p": 0.25,
        "min_tokens": 2,
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logprobs": 0,
        "prompt_logprobs": 5,
        "n": 3,
    }
    ids = {
        "stop_token_ids": [8],
        "eos_token_ids": [2, 3],
        "allowed_token_ids": [1, 2, 3],
        "bad_token_ids": [1],
    }
    request = parse(
        sampling=as_sent | ids | {"logit_bias": {9: 2.0, 4: -1.0}},
        priority=-7,
        tenant=2**64 - 1,
        client=2**64 - 2,
        deadline_seconds=2.5,
        continuations=[{"index": 1, "token_ids": pack_tokens([6, 7])}],
    )
    sets: dict[str, Any] = {name: frozenset(tokens) for name, tokens in ids.items()}
    bias: dict[str, Any] = {"logit_bias": ((4, -1.0), (9, 2.0))}
    assert request.sampling == SamplingParams(max_tokens=6, **as_sent, **sets, **bias)  # type: ignore[arg-type]
    assert (request.priority, request.tenant, request.deadline_seconds) == (-7, 2**64 - 1, 2.5)
    assert request.client == 2**64 - 2
    assert request.continuations == (Continuation(index=1, token_ids=(6, 7)),)
    assert (request.token_ids, request.prompt_length, len(request.names)) == (PROMPT, 20, 2)


def test_beams_arrive_and_what_an_older_router_leaves_out_is_the_default() -> None:
    never = inference_pb2.EARLY_STOPPING_NEVER
    beams = {"beam_width": 4, "n": 2, "length_penalty": -0.5}
    search = parse(sampling=beams | {"early_stopping": never}).sampling
    assert search == SamplingParams(max_tokens=6, early_stopping="never", **beams)  # type: ignore[arg-type]
    request = parse(sampling={"length_penalty": 0.0})
    assert request.sampling == SamplingParams(max_tokens=6, length_penalty=0.0)
    assert (request.priority, request.deadline_seconds, request.continuations) == (0, None, ())


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop_token_ids": [VOCAB_SIZE]},
        {"stop_token_ids": [5] * 65},
        {"eos_token_ids": [VOCAB_SIZE]},
        {"allowed_token_ids": [1, 2**32 - 1]},
        {"bad_token_ids": [VOCAB_SIZE]},
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {1: math.nan}},
        {"temperature": math.inf},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 1000.0},
        {"repetition_penalty": -1.0},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"max_tokens": 0},
        {"min_tokens": 7},
        {"beam_width": 2, "n": 3},
        {"beam_width": 2, "top_k": 5},
        {"beam_width": 2, "logprobs": 1},
        {"length_penalty": math.nan},
        {"early_stopping": 9},
        {"structured_output": StructuredOutput()},
        {"structured_output": StructuredOutput(json_object=True), "beam_width": 2},
        {"structured_output": StructuredOutput(json_object=True), "min_tokens": 2},
    ],
)
def test_sampling_out_of_bounds_is_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(sampling=sampling)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": b""},
        {"token_ids": b"\x01\x02\x03"},
        {"token_ids": pack_tokens([VOCAB_SIZE])},
        {"token_ids": pack_tokens([-1])},
        {"block_names": b""},
        {"block_names": b"short"},
        {"block_names": ROOT * 3},
        {"block_names": ROOT * 2},
        {"block_names": b"".join((ROOT, *chain(ROOT, [6] * 16, 16)))},
        {"prompt_tokens": 2**32 - 1},
        {"token_ids": pack_tokens([5] * (CONTEXT + 1))},
        {"request_id": "a\nb"},
        {"request_id": "a" * 129},
        {"priority": 101},
        {"priority": -101},
        {"deadline_seconds": math.nan},
        {"deadline_seconds": -1.0},
        {"deadline_seconds": math.inf},
        {"expected_pause_seconds": math.nan},
        {"expected_pause_seconds": -1.0},
        {"expected_pause_seconds": 3601.0},
        {"continuations": [{"index": 0, "token_ids": pack_tokens([5] * (CONTEXT + 1))}]},
        {"continuations": [{"index": 0, "token_ids": pack_tokens([VOCAB_SIZE])}]},
        {"continuations": [{"index": 0, "token_ids": b"\x01"}]},
    ],
)
def test_a_request_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(**changes)
