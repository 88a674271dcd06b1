"""Each wrong field is reported with its code and name, all at once, and no value is echoed."""

import math
from dataclasses import replace
from typing import Any

import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from blockyard.router.request.prompts import check_prompt_report
from blockyard.router.request.sampling_checks import SamplingLimits
from blockyard.router.request.validation import check_model_name, kept_tokens, valid_generation

from .facts import FACTS

MAX_MODEL_LEN = 128
LIMITS = SamplingLimits()


def validate(**fields: Any) -> Any:
    if not {"prompt", "chat", "prompt_token_ids"} & fields.keys():
        fields["prompt"] = "hello"
    return valid_generation(
        inference_pb2.GenerateRequest(**fields), FACTS, max_model_len=MAX_MODEL_LEN, limits=LIMITS
    )


def said(last: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    """A chat whose last message has other fields."""
    hello = {"role": "user", "content": "hello"}
    return {"chat": {"messages": [hello, hello | (last or {})], **options}}


def violations(**fields: Any) -> set[str]:
    with pytest.raises(InvalidRequest) as refused:
        validate(**fields)
    return {violation.field for violation in refused.value.violations}


def test_all_wrong_fields_are_named_at_once() -> None:
    found = violations(
        prompt="", request_id="a\nb", cache_salt="ü", sampling={"temperature": math.nan, "top_p": 2.0}
    )
    assert found == {"prompt", "request_id", "cache_salt", "sampling.temperature", "sampling.top_p"}


UNSAFE = ["a" * 129, "a\nb", "../..", "*", "a b", "\0", "é", "a/b"]


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("request_id", ["a" * 128, "a.b_c:d-E9"], ["", *UNSAFE]),
        ("cache_salt", ["a" * 128], UNSAFE),
        ("priority", [-100, 100], [-101, 2**31 - 1]),
        ("truncate_prompt_tokens", [-1, 1, 2**31 - 1], [-2, 0]),
    ],
)
def test_a_field_of_a_request_is_taken_inside_its_range_and_named_outside(field, good, bad):
    for value in good:
        request = validate(**{field: value})
        assert field == "cache_salt" or getattr(request, field) == value
    for value in bad:
        assert violations(**{field: value}) == {field}
    assert validate().request_id != validate().request_id, "an absent one is drawn"


def test_logprobs_of_a_prompt_must_fit_one_message() -> None:
    check_prompt_report(1_000_000, None)
    check_prompt_report(20_000, 20)
    with pytest.raises(InvalidRequest) as refused:
        check_prompt_report(40_000, 20)
    assert [violation.field for violation in refused.value.violations] == ["sampling.prompt_logprobs"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "user", "content": "x"}] * 100_000}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "root", "content": "x"}]}}, "chat.messages.role"),
        ({"chat": {"messages": [{"content": "x"}]}}, "chat.messages.role"),
        ({"chat": {"messages": [{"role": "assistant", "content": "x"}]}}, "chat.messages"),
        (said({"name": ""}), "chat.messages.name"),
        (said({"name": "a" * 257}), "chat.messages.name"),
        (said(template_kwargs="{"), "chat.template_kwargs"),
        (said(template_kwargs="[]"), "chat.template_kwargs"),
        (said(template_kwargs='{"a b": 1}'), "chat.template_kwargs"),
        (said(template_kwargs='{"a": NaN}'), "chat.template_kwargs"),
        (said(template_kwargs='{"a": "\\ud800"}'), "chat.template_kwargs"),
        (said(template_kwargs='{"a": "' + "b" * 16_384 + '"}'), "chat.template_kwargs"),
        (said(template_kwargs='{"a": ' + "[" * 17 + "]" * 17 + "}"), "chat.template_kwargs"),
        (said(template_kwargs='{"a": ' + "[" * 8_000 + "]" * 8_000 + "}"), "chat.template_kwargs"),
        (said(continue_final_message=True), "chat.continue_final_message"),
        (
            said({"role": "assistant"}, continue_final_message=True, add_generation_prompt=True),
            "chat.continue_final_message",
        ),
        ({"prompt": ""}, "prompt"),
        ({"prompt_token_ids": {}}, "prompt_token_ids"),
        ({"prompt_token_ids": {"ids": [1, 1000]}}, "prompt_token_ids"),
        ({"prompt_token_ids": {"ids": [2**32 - 1]}}, "prompt_token_ids"),
    ],
)
def test_a_prompt_that_cannot_be_is_named(message: dict[str, Any], field: str) -> None:
    assert violations(**message) == {field}


def test_a_continued_message_takes_the_place_of_the_generation_prompt() -> None:
    for options, prompts in (
        ({}, True),
        ({"add_generation_prompt": True}, True),
        ({"add_generation_prompt": False}, False),
        ({"continue_final_message": False}, True),
        ({"continue_final_message": True}, False),
        ({"continue_final_message": True, "add_generation_prompt": False}, False),
    ):
        prompt = validate(**said({"role": "assistant"}, **options)).prompt
        assert prompt.add_generation_prompt is prompts
        assert prompt.continue_final_message is options.get("continue_final_message", False)


def test_as_many_tokens_as_fit_leave_room_for_max_tokens() -> None:
    def kept(truncate_prompt_tokens: int | None, **sampling: int) -> int | None:
        fields = {} if truncate_prompt_tokens is None else {"truncate_prompt_tokens": truncate_prompt_tokens}
        return kept_tokens(validate(sampling=sampling, **fields), MAX_MODEL_LEN)

    assert (kept(None), kept(7), kept(-1), kept(-1, max_tokens=28)) == (None, 7, 127, 100)
    with pytest.raises(InvalidRequest, match="leaves room"):
        kept(-1, max_tokens=128)


def test_tokens_that_are_truncated_may_be_more_than_a_context() -> None:
    ids = {"ids": [1] * 131_071}
    assert len(validate(prompt_token_ids=ids, truncate_prompt_tokens=5).prompt.token_ids) == 131_071
    with pytest.raises(ContextLengthExceeded):
        validate(prompt_token_ids=ids)
    with pytest.raises(ContextLengthExceeded):
        validate(prompt_token_ids={"ids": [1] * 131_072}, truncate_prompt_tokens=5)


def test_names_and_variables_count_as_text() -> None:
    plain = validate(**said()).estimated_tokens
    assert validate(**said({"name": "ann" * 40})).estimated_tokens > plain + 25
    assert validate(**said(template_kwargs='{"a": "' + "b" * 120 + '"}')).estimated_tokens > plain + 25


def test_no_input_at_all_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="required"):
        valid_generation(inference_pb2.GenerateRequest(), FACTS, max_model_len=MAX_MODEL_LEN, limits=LIMITS)


def fields_of(kind: str, size: int) -> dict[str, Any]:
    """Return a prompt of so many tokens, or of a text of so many bytes."""
    if kind == "prompt_token_ids":
        return {kind: {"ids": [7] * size}}
    text = "é" * (size // 2) + "e" * (size % 2)
    halves = (text[: len(text) // 2], text[len(text) // 2 :])
    return (
        {kind: text}
        if kind == "prompt"
        else {kind: {"messages": [{"role": "user", "content": half} for half in halves]}}
    )


@pytest.mark.parametrize(
    ("kind", "most", "far_too_many"),
    [
        ("prompt_token_ids", MAX_MODEL_LEN - 1, 4_000_000),
        ("prompt", 1280, 10_000_000),
        ("chat", 1280, 10_000_000),
    ],
)
def test_a_prompt_must_leave_room_and_what_no_context_could_hold_is_refused_before_it_is_tokenised(
    kind: str, most: int, far_too_many: int
) -> None:
    estimated = validate(**fields_of(kind, most)).estimated_tokens
    assert kind != "prompt_token_ids" or estimated == most
    for size in (most + 1, far_too_many):
        with pytest.raises(ContextLengthExceeded):
            validate(**fields_of(kind, size))


def test_another_model_is_not_found_by_its_name_which_is_repeated_only_where_it_reads_as_one() -> None:
    for name in ("gpt-99", "Qwen/Qwen3-0.6B", "max_tokens", "a@main", "a" * 128):
        with pytest.raises(UnknownModel) as refused:
            validate(model=name)
        assert refused.value.message == f"The model `{name}` does not exist. Served here: `tiny`."
        (violation,) = refused.value.violations
        assert (violation.field, violation.description) == ("model", "must be one that is served: `tiny`")
    for name in ("", "a" * 129, "a\nb", "a`b", "\x1b[31m", "é", "a model", "<b>", "\u202ea"):
        with pytest.raises(UnknownModel) as refused:
            validate(model=name)
        assert refused.value.message == "The model asked for does not exist. Served here: `tiny`."
    assert validate(model="tiny")


def test_of_many_served_names_the_first_are_told() -> None:
    facts = replace(FACTS, names=tuple(f"m{number}" for number in range(9)))
    with pytest.raises(UnknownModel, match=r"`m0`, .*, `m7`\.$"):
        check_model_name("other", facts.names)


def test_nothing_of_the_input_is_echoed() -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(request_id="hunter2!", sampling={"stop": ["hunter2" * 60]})
    told = str(refused.value) + str(refused.value.violations)
    assert "hunter2" not in told
