"""Python's forms of a request's fields, and errors that name the wrong argument."""

import json
import re
from typing import Any

import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.client.arguments import (
    GenerateArguments,
    generate_request,
    lookup_request,
    placement_request,
)
from blockyard.router.client.requests import tokenize

TAKEN: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.75,
    "min_p": 0.25,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 2.0,
    "logit_bias": {5: 1.5, 6: -2.0},
    "allowed_token_ids": [5, 6],
    "bad_token_ids": [6],
    "max_tokens": 9,
    "min_tokens": 3,
    "ignore_eos": True,
    "seed": -5,
    "stop": ["a", "b"],
    "stop_token_ids": [8],
    "skip_special_tokens": False,
    "bad_words": ["a", "b"],
    "include_stop_in_output": True,
    "logprobs": 2,
    "prompt_logprobs": 0,
    "n": 3,
    "beam_width": 4,
    "length_penalty": 0.5,
}
FORMED = {"early_stopping", "json_schema", "regex", "json_object"}
BESIDE = {"messages", "prompt_token_ids", "model", "request_id", "cache_salt", "public_prefix"}
BESIDE |= {"priority", "session_id", "policy", "truncate_prompt_tokens", "return_prompt_token_ids"}
BESIDE |= {"expected_pause_seconds", "prefetch", "lora_name"}
OF_CHATS = {"chat_template_kwargs", "add_generation_prompt", "continue_final_message"}


def sampling(**arguments: Any) -> inference_pb2.SamplingParams:
    return generate_request("x", arguments).sampling  # type: ignore[arg-type]


def test_every_argument_is_tested_here() -> None:
    assert TAKEN.keys() | FORMED | BESIDE | OF_CHATS == GenerateArguments.__annotations__.keys()
    fields = set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert TAKEN.keys() == fields - {"early_stopping", "structured_output"}


def test_sampling_arguments_reach_their_fields() -> None:
    assert sampling(**TAKEN) == inference_pb2.SamplingParams(**TAKEN)
    assert sampling(**dict.fromkeys(TAKEN)) == inference_pb2.SamplingParams()


def test_zero_and_false_are_sent_and_not_taken_for_absent() -> None:
    sent = sampling(temperature=0.0, logprobs=0, ignore_eos=False, seed=0)
    assert {field.name for field, _ in sent.ListFields()} == {"temperature", "logprobs", "ignore_eos", "seed"}


def test_early_stopping_is_said_as_in_transformers() -> None:
    for value, name in ((True, "FIRST"), (False, "HEURISTIC"), ("never", "NEVER"), (None, "UNSPECIFIED")):
        expected = inference_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{name}")
        assert sampling(early_stopping=value).early_stopping == expected


def test_structured_output_is_a_value_a_text_or_nothing() -> None:
    schema = {"type": "object", "properties": {"naïve": {"type": "string"}}}
    assert json.loads(sampling(json_schema=schema).structured_output.json_schema) == schema
    assert sampling(json_schema="{}").structured_output.json_schema == "{}"
    assert sampling(json_schema=True).structured_output.json_schema == "true"
    assert sampling(regex="a+").structured_output.regex == "a+"
    assert sampling(json_object=True).structured_output.json_object
    assert not sampling(json_object=False).HasField("structured_output")


@pytest.mark.parametrize("kwargs", [{"thinking": False}, '{"thinking": false}'])
def test_arguments_of_chats_reach_the_chat(kwargs: Any) -> None:
    messages = [{"role": "user", "content": "x", "name": "ann"}, {"role": "assistant", "content": "y"}]
    arguments: Any = {"messages": messages, "chat_template_kwargs": kwargs, "continue_final_message": True}
    expected = inference_pb2.Chat(
        messages=messages, template_kwargs='{"thinking": false}', continue_final_message=True
    )
    assert generate_request(None, arguments).chat == expected
    assert lookup_request(None, arguments).chat == expected
    assert (
        tokenize(
            None, messages, None, {name: arguments[name] for name in arguments.keys() & OF_CHATS}
        ).request.chat
        == expected
    )
    with pytest.raises(ValueError, match=r"^add_generation_prompt: is for messages"):
        generate_request("x", {"add_generation_prompt": False})


def test_what_is_beside_sampling_reaches_the_request() -> None:
    beside: Any = {"model": "m", "request_id": "r", "cache_salt": "s", "priority": -5, "public_prefix": True}
    beside |= {"truncate_prompt_tokens": -1, "return_prompt_token_ids": True}
    request = generate_request(None, {"prompt_token_ids": [1, 2], **beside})
    assert list(request.prompt_token_ids.ids) == [1, 2]
    assert {name: getattr(request, name) for name in beside} == beside
    assert list(sampling(bad_words="word").bad_words) == ["word"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("top_k", 2**32),
        ("n", -1),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ["\ud800"]),
        ("stop", "\ud800"),
        ("stop_token_ids", [-1]),
        ("logit_bias", {-1: 1.0}),
        ("regex", "\ud800"),
        ("json_schema", {"default": {1, 2}}),
        ("early_stopping", "always"),
        ("request_id", "\ud800"),
        ("priority", 2**31),
        ("prompt_token_ids", [-1]),
        ("messages", [{"role": "user", "content": "\ud800"}]),
    ],
)
def test_a_value_that_protobuf_cannot_hold_is_a_value_error_with_its_name(field: str, value: Any) -> None:
    prompt = None if field in ("prompt_token_ids", "messages") else "x"
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        generate_request(prompt, {field: value})  # type: ignore[misc]


MISTAKES = [
    (ValueError, r"^prompt: must be text", lambda: generate_request("\ud800", {})),
    (TypeError, r"^temperature: ", lambda: sampling(temperature="hot")),
    (
        ValueError,
        "at most one of json_schema, regex, json_object",
        lambda: sampling(regex="a", json_object=True),
    ),
    (TypeError, "unknown arguments: structured_output", lambda: sampling(structured_output={"regex": "a"})),
    (
        TypeError,
        r"^unknown arguments: add_generation_promp \(did you mean add_",
        lambda: tokenize(None, [{"role": "user", "content": "x"}], None, {"add_generation_promp": True}),  # type: ignore[typeddict-unknown-key]
    ),
]


@pytest.mark.parametrize(("kind", "told", "call"), MISTAKES)
def test_a_mistake_is_named_before_anything_is_sent(kind, told, call):
    with pytest.raises(kind, match=told):
        call()


@pytest.mark.parametrize(
    ("call", "arguments", "told"),
    [
        (generate_request, {"max_token": 5}, "max_token (did you mean max_tokens?)"),
        (generate_request, {"promt": "x"}, "promt (did you mean prompt?)"),
        (generate_request, {"timeout_second": 5}, "timeout_second (did you mean timeout_seconds?)"),
        (generate_request, {"zzz": 1, "top_pp": 1}, "top_pp (did you mean top_p?), zzz"),
        (generate_request, {"max_completion_tokens": 1}, "max_completion_tokens"),
        (lookup_request, {"cache_sal": "x"}, "cache_sal (did you mean cache_salt?)"),
        (lookup_request, {"session": "x"}, "session"),
        (placement_request, {"session": "x"}, "session (did you mean session_id?)"),
    ],
)
def test_an_unknown_argument_is_named_with_the_known_one_that_it_resembles(call, arguments, told):
    with pytest.raises(TypeError, match=f"^{re.escape(f'unknown arguments: {told}')}$"):
        call(None, arguments)
