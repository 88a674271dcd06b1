"""Each field that is wrong gets its code and its name, all of them at once, and nothing of it is echoed."""

import math
from dataclasses import replace
from typing import Any

import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from blockyard.router.model_facts import ModelFacts
from blockyard.router.sampling import parse_sampling
from blockyard.router.validation import valid_generation

FACTS = ModelFacts(
    name="tiny",
    vocab_size=1000,
    max_position_embeddings=128,
    eos_token_ids=frozenset({2, 0}),
    longest_token_bytes=10,
)
MAX_MODEL_LEN = 128


def validate(**fields: Any) -> Any:
    if not {"prompt", "chat", "prompt_token_ids"} & fields.keys():
        fields["prompt"] = "hello"
    return valid_generation(inference_pb2.GenerateRequest(**fields), FACTS, max_model_len=MAX_MODEL_LEN)


def violations(**fields: Any) -> set[str]:
    with pytest.raises(InvalidRequest) as refused:
        validate(**fields)
    return {violation.field for violation in refused.value.violations}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1.0),
        ("temperature", 1e30),
        ("top_p", 0.0),
        ("top_p", -0.0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("max_tokens", 0),
        ("max_tokens", 2**32 - 1),
        ("stop", [""]),
        ("stop", ["x" * 257]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [1000]),
        ("stop_token_ids", [2**32 - 1]),
        ("stop_token_ids", [1] * 65),
        ("stop_token_ids", [1] * 1_000_000),
    ],
)
def test_a_sampling_value_outside_its_range_is_named(field: str, value: Any) -> None:
    assert violations(sampling={field: value}) == {f"sampling.{field}"}


def test_all_wrong_fields_are_named_at_once() -> None:
    found = violations(
        prompt="", request_id="a\nb", cache_salt="ü", sampling={"temperature": math.nan, "top_p": 2.0}
    )
    assert found == {"prompt", "request_id", "cache_salt", "sampling.temperature", "sampling.top_p"}


def test_min_tokens_above_max_tokens_or_out_of_reach_is_refused() -> None:
    assert violations(sampling={"min_tokens": 5, "max_tokens": 4}) == {"sampling.min_tokens"}
    small = replace(FACTS, vocab_size=3, max_position_embeddings=8, eos_token_ids=frozenset({2}))
    message = inference_pb2.SamplingParams(min_tokens=1, stop_token_ids=[0, 1])
    assert {found.field for found in parse_sampling(message, small)[1]} == {"sampling.min_tokens"}


@pytest.mark.parametrize("text", ["a" * 129, "a\nb", "../..", "*", "a b", "\0", "é", "a/b"])
def test_names_are_short_and_of_safe_characters(text: str) -> None:
    assert violations(request_id=text) == {"request_id"}
    assert violations(cache_salt=text) == {"cache_salt"}


def test_an_empty_request_id_is_refused_and_an_absent_one_drawn() -> None:
    assert violations(request_id="") == {"request_id"}
    assert validate().request_id != validate().request_id


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "user", "content": "x"}] * 100_000}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "root", "content": "x"}]}}, "chat.messages.role"),
        ({"chat": {"messages": [{"content": "x"}]}}, "chat.messages.role"),
        ({"chat": {"messages": [{"role": "assistant", "content": "x"}]}}, "chat.messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt_token_ids": {}}, "prompt_token_ids"),
        ({"prompt_token_ids": {"ids": [1, 1000]}}, "prompt_token_ids"),
        ({"prompt_token_ids": {"ids": [2**32 - 1]}}, "prompt_token_ids"),
    ],
)
def test_a_prompt_that_cannot_be_is_named(message: dict[str, Any], field: str) -> None:
    assert violations(**message) == {field}


def test_no_input_at_all_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="required"):
        valid_generation(inference_pb2.GenerateRequest(), FACTS, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("num_tokens", "fits"), [(MAX_MODEL_LEN - 1, True), (MAX_MODEL_LEN, False), (4_000_000, False)]
)
def test_a_prompt_of_tokens_must_leave_room_for_one(num_tokens: int, fits: bool) -> None:
    fields = {"prompt_token_ids": {"ids": [7] * num_tokens}}
    if fits:
        assert validate(**fields).estimated_tokens == num_tokens
    else:
        with pytest.raises(ContextLengthExceeded):
            validate(**fields)


@pytest.mark.parametrize(("num_bytes", "fits"), [(1280, True), (1281, False), (10_000_000, False)])
@pytest.mark.parametrize("kind", ["prompt", "chat"])
def test_a_text_that_no_context_could_hold_is_refused_before_it_is_tokenised(
    kind: str, num_bytes: int, fits: bool
) -> None:
    text = "é" * (num_bytes // 2) + "e" * (num_bytes % 2)
    half = len(text) // 2
    messages = [{"role": "user", "content": part} for part in (text[:half], text[half:])]
    fields: dict[str, Any] = {"prompt": text} if kind == "prompt" else {"chat": {"messages": messages}}
    if fits:
        assert validate(**fields)
    else:
        with pytest.raises(ContextLengthExceeded):
            validate(**fields)


def test_another_model_is_not_found_without_repeating_its_name() -> None:
    with pytest.raises(UnknownModel) as refused:
        validate(model="a-secret-model")
    assert "secret" not in str(refused.value)
    assert validate(model="tiny")


def test_nothing_of_the_input_is_echoed() -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(request_id="hunter2!", sampling={"stop": ["hunter2" * 60]})
    told = str(refused.value) + str(refused.value.violations)
    assert "hunter2" not in told


def test_defaults_are_filled_in_and_outputs_capped_at_the_context() -> None:
    sampling = validate().sampling.for_engine(room_tokens=50, facts=FACTS)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
    assert (sampling.max_tokens, sampling.min_tokens) == (50, 0)
    assert list(sampling.eos_token_ids) == [0, 2]
    capped = validate(sampling={"max_tokens": 1000, "min_tokens": 900, "ignore_eos": True})
    engine = capped.sampling.for_engine(room_tokens=50, facts=FACTS)
    assert (engine.max_tokens, engine.min_tokens, list(engine.eos_token_ids)) == (50, 50, [])


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert validate(sampling={"temperature": 1e-30}).sampling.temperature == 0.0


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**63 - 1])
def test_every_64_bit_seed_is_kept_and_an_absent_one_drawn(seed: int) -> None:
    assert validate(sampling={"seed": seed}).sampling.seed == seed
    assert validate().sampling.seed != validate().sampling.seed


def test_keeping_more_tokens_than_there_are_keeps_all() -> None:
    sampling = validate(sampling={"top_k": 2**32 - 1}).sampling
    assert sampling.for_engine(room_tokens=5, facts=FACTS).top_k == 0
