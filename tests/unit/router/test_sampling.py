"""Sampling parameters: values out of range are named, conflicts are refused, and the engine gets the rest."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from blockyard.proto.text import load_tokenizer
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.request.sampling import parse_sampling
from blockyard.router.request.sampling_checks import SamplingLimits, ban_words, sampling_violations
from blockyard.router.tokenizing.model_facts import (
    GenerationConfig,
    ModelFacts,
    SamplingDefaults,
    read_facts,
    read_sampling_defaults,
)

from .facts import FACTS

CHECKPOINT = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
LIMITS = SamplingLimits(max_outputs=8, max_beam_width=6)
BEAMS = {"beam_width": 4}
OBJECT = {"json_object": True}


def violations(facts: ModelFacts = FACTS, **sampling: Any) -> set[str]:
    message = inference_pb2.SamplingParams(**sampling)
    return {found.field.removeprefix("sampling.") for found in sampling_violations(message, facts, LIMITS)}


def for_engine(**sampling: Any) -> session_pb2.EngineSampling:
    message = inference_pb2.SamplingParams(**sampling)
    assert sampling_violations(message, FACTS, LIMITS) == []
    return parse_sampling(message).for_engine(room_tokens=50, facts=FACTS)


NUMBERS: dict[str, tuple[list[float], list[float]]] = {
    "temperature": ([0.0, 1e-30, 100.0], [-1.0, 100.5, 1e30]),
    "top_p": ([1e-30, 1.0], [0.0, -0.0, 1.0001]),
    "min_p": ([0.0, 1.0], [-0.01, 1.01]),
    "presence_penalty": ([-2.0, 2.0], [-2.01, 2.01]),
    "frequency_penalty": ([-2.0, 2.0], [-2.01, 2.01]),
    "repetition_penalty": ([0.01, 100.0], [0.0, 0.009, -1.0, 100.5]),
    "length_penalty": ([-10.0, 10.0], [-10.1, 10.1]),
}
COUNTS: dict[str, tuple[list[int], list[int]]] = {
    "top_k": ([0, 2**32 - 1], []),
    "max_tokens": ([1, 2**24], [0, 2**24 + 1, 2**32 - 1]),
    "min_tokens": ([0, 2**24], [2**24 + 1]),
    "logprobs": ([0, 20], [21]),
    "prompt_logprobs": ([0, 20], [21]),
    "n": ([1, 8], [0, 9, 2**32 - 1]),
    "beam_width": ([1, 6], [0, 7, 2**32 - 1]),
    "early_stopping": ([0, 1, 2, 3], [4, -1]),
    "seed": ([-(2**63), 2**63 - 1], []),
}
LISTS: dict[str, tuple[list[Any], list[Any]]] = {
    "stop": ([["x" * 256] * 16], [[""], ["x" * 257], ["x"] * 17]),
    "stop_token_ids": ([[999] * 64], [[1000], [2**32 - 1], [1] * 65, [1] * 1_000_000]),
    "allowed_token_ids": ([[999] * 65_536], [[1000], [2**32 - 1], [1] * 65_537]),
    "bad_token_ids": ([[999] * 1024], [[1000], [2**32 - 1], [1] * 1025, [1] * 1_000_000]),
    "bad_words": ([["x" * 64] * 64, [" x"]], [[""], ["  "], ["x" * 65], ["x"] * 65, ["x"] * 1_000_000]),
    "logit_bias": (
        [{1: 100.0, 999: -100.0}, dict.fromkeys(range(1000), 1.0)],
        [{1000: 1.0}, {1: 100.5}, {1: -100.5}, {1: math.nan}, {1: math.inf}, dict.fromkeys(range(1025), 1.0)],
    ),
}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


SCHEMAS = ["{}", "true", '{"type": "object", "properties": {"a": {"type": "string"}}}', nested(99)]
NO_SCHEMAS = ["", "{", "[]", '"text"', '{"minimum": NaN}', "1" * 5000, "[" * 32_768 + "]" * 32_768]
NO_SCHEMAS += [nested(10_000), nested(101), '"' + "é" * 32_767 + '"']
STRUCTURED: tuple[list[Any], list[Any]] = (
    [*({"json_schema": text} for text in SCHEMAS), {"regex": "a+"}, {"regex": "x" * 8_192}, OBJECT],
    [
        *({"json_schema": text} for text in NO_SCHEMAS),
        *({}, {"regex": ""}, {"regex": "é" * 4_097}, {"json_object": False}),
    ],
)
TABLE: dict[str, tuple[list[Any], list[Any]]] = {
    **{name: (good, [*bad, math.nan, math.inf, -math.inf]) for name, (good, bad) in NUMBERS.items()},
    **COUNTS,
    **LISTS,
    "structured_output": STRUCTURED,
}
UNCHECKED = {"ignore_eos", "include_stop_in_output", "skip_special_tokens"}


def test_every_field_is_in_the_table() -> None:
    assert TABLE.keys() | UNCHECKED == set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("field", TABLE)
def test_a_value_inside_its_range_is_taken_and_one_outside_named(field: str) -> None:
    good, bad = TABLE[field]
    for values, named in ((good, set()), (bad, {field})):
        for value in values:
            assert violations(**{field: value}) == named, repr(value)[:80]


@pytest.mark.parametrize(
    ("words", "banned"),
    [
        (["yes"], {1, 11}),
        ([" yes", "yes", "no"], {1, 11, 2}),
        ([], set()),
        (["two words"], None),
        (["split"], None),
        ([""], set()),
        (["long" * 17], set()),
    ],
)
def test_bad_words_are_the_tokens_of_both_spellings(words: list[str], banned: set[int] | None) -> None:
    """ "no" is the same token behind the token of a space, "split" is two there that leave its own out."""
    spelt = {"yes": [1], " yes": [11], "no": [2], " no": [9, 2], "split": [3], " split": [4, 5]}
    message = inference_pb2.SamplingParams(bad_words=words, bad_token_ids=[7])
    if banned is None:
        with pytest.raises(InvalidRequest, match="one token") as refused:
            ban_words(message, lambda word: spelt.get(word, [6, 6]))
        assert [found.field for found in refused.value.violations] == ["sampling.bad_words"]
        return
    ban_words(message, spelt.__getitem__)
    assert list(message.bad_token_ids) == [7, *sorted(banned)]


def test_all_that_is_wrong_is_named_at_once() -> None:
    wrong = {name: values[1][0] for name, values in TABLE.items() if values[1] and name != "beam_width"}
    assert violations(**wrong) >= wrong.keys()


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_token_ids", "stop_token_ids", "stop"])
def test_elements_of_a_list_that_is_too_long_are_not_looked_at(field: str) -> None:
    element: Any = "" if field == "stop" else 2**32 - 1
    message = inference_pb2.SamplingParams(**{field: [element] * 1_000_000})
    (found,) = sampling_violations(message, FACTS, LIMITS)
    assert found.description.startswith("at most")


def test_a_beam_search_takes_what_says_how_it_ends_and_nothing_that_changes_what_is_likely() -> None:
    neutral = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    ends = {"n": 4, "length_penalty": -1.0, "early_stopping": 3, "max_tokens": 9, "min_tokens": 2}
    assert not violations(**BEAMS, **neutral, **ends, seed=5, stop_token_ids=[4], ignore_eos=True)
    for name, value in (
        *(("temperature", 0.5), ("top_k", 3), ("top_p", 0.5), ("min_p", 0.1), ("presence_penalty", 1.0)),
        *(("frequency_penalty", -1.0), ("repetition_penalty", 1.5), ("logit_bias", {1: 1.0})),
        *(("allowed_token_ids", [5]), ("bad_token_ids", [5]), ("stop", ["x"]), ("logprobs", 0)),
        *(("prompt_logprobs", 0), ("structured_output", OBJECT)),
    ):
        assert violations(**BEAMS, **{name: value}) == {name}
        assert violations(**{name: value}) == set()
    assert violations(beam_width=3, n=4) == {"beam_width"}, "there are at least as many beams as outputs"


def test_an_end_that_contradicts_another_is_refused() -> None:
    for other in ({"ignore_eos": True}, {"min_tokens": 1}):
        assert violations(structured_output=OBJECT, **other) == set(other)
    assert violations(min_tokens=5, max_tokens=4) == {"min_tokens"}
    assert violations(min_tokens=4, max_tokens=4) == set()


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"allowed_token_ids": [1, 3], "bad_token_ids": [3, 1]}, "allowed_token_ids"),
        ({"bad_token_ids": [0, 1, 2, 3]}, "bad_token_ids"),
        ({"min_tokens": 1, "allowed_token_ids": [2]}, "min_tokens"),
        ({"min_tokens": 1, "allowed_token_ids": [2, 3], "stop_token_ids": [3]}, "min_tokens"),
        ({"min_tokens": 1, "allowed_token_ids": [2, 3], "bad_token_ids": [3]}, "min_tokens"),
        ({"min_tokens": 1, "stop_token_ids": [1, 3]}, "min_tokens"),
        ({"min_tokens": 1, "bad_token_ids": [1], "stop_token_ids": [3]}, "min_tokens"),
    ],
)
def test_lists_that_leave_nothing_to_sample_are_refused(sampling: dict[str, Any], field: str) -> None:
    """The model has the tokens 0 to 3, of which 0 and 2 end a sequence."""
    small = replace(FACTS, vocab_size=4)
    assert violations(small, **sampling) == {field}
    if field == "min_tokens":
        without = {name: value for name, value in sampling.items() if name != "min_tokens"}
        assert violations(small, **without) == set()
    if "stop_token_ids" not in sampling and field == "min_tokens" and "bad_token_ids" not in sampling:
        assert violations(small, **sampling, ignore_eos=True) == set()


def test_the_engine_gets_every_default_filled_in() -> None:
    sampling = for_engine(seed=7)
    assert sampling == session_pb2.EngineSampling(
        temperature=1.0,
        top_p=1.0,
        max_tokens=50,
        seed=7,
        eos_token_ids=[0, 2],
        repetition_penalty=1.0,
        n=1,
        length_penalty=1.0,
        early_stopping=inference_pb2.EARLY_STOPPING_HEURISTIC,
    )
    assert not sampling.HasField("logprobs")
    assert not sampling.HasField("prompt_logprobs")


def test_the_engine_gets_everything_that_was_sent() -> None:
    given: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25, "max_tokens": 9}
    given |= {"presence_penalty": 1.5, "frequency_penalty": -1.5, "repetition_penalty": 2.0, "min_tokens": 3}
    given |= {"logit_bias": {5: 1.5}, "allowed_token_ids": [5, 6], "bad_token_ids": [6], "seed": -5}
    given |= {"stop_token_ids": [8], "logprobs": 2, "prompt_logprobs": 0, "n": 3, "length_penalty": 0.5}
    given |= {"early_stopping": inference_pb2.EARLY_STOPPING_NEVER}
    sampling = for_engine(**given, ignore_eos=True)
    assert sampling == session_pb2.EngineSampling(**given)
    structured = for_engine(structured_output={"regex": "a+"}, seed=1)
    assert structured.structured_output.regex == "a+"


def test_the_engine_gets_what_it_can_compute_with() -> None:
    capped = for_engine(max_tokens=1000, min_tokens=900, ignore_eos=True)
    assert (capped.max_tokens, capped.min_tokens, list(capped.eos_token_ids)) == (50, 50, [])
    beams = for_engine(**BEAMS)
    assert (beams.temperature, beams.beam_width, beams.n) == (0.0, 4, 1), "a beam search is greedy"
    assert for_engine(temperature=1e-30).temperature == 0.0, "too small to divide by"
    assert for_engine(repetition_penalty=0.01).repetition_penalty >= 0.01, "through float32"
    assert for_engine(top_k=2**32 - 1).top_k == 0, "more than there are"
    assert for_engine().seed != for_engine().seed, "drawn"


def test_scores_of_several_outputs_need_the_sampled_tokens_logprobs() -> None:
    assert for_engine(n=2).HasField("logprobs")
    assert (for_engine(n=2).logprobs, for_engine(n=2, logprobs=3).logprobs) == (0, 3)
    assert not for_engine(n=2, beam_width=2).HasField("logprobs"), "the engine says what a beam's score is"


MODELS_OWN = replace(
    FACTS,
    sampling_defaults=SamplingDefaults(
        temperature=0.5, top_k=20, top_p=0.75, min_p=0.25, repetition_penalty=1.25
    ),
)
DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def with_models_defaults(**sampling: Any) -> list[float]:
    message = inference_pb2.SamplingParams(**sampling)
    assert sampling_violations(message, MODELS_OWN, LIMITS) == []
    request = parse_sampling(message, MODELS_OWN.sampling_defaults)
    return [getattr(request, name) for name in DEFAULTED]


def test_a_request_overrides_each_of_the_models_defaults_and_a_beam_search_takes_none() -> None:
    assert with_models_defaults() == [0.5, 20, 0.75, 0.25, 1.25]
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    for number, (name, value) in enumerate(neutral.items()):
        expected = with_models_defaults()
        expected[number] = value
        assert with_models_defaults(**{name: value}) == expected
    assert with_models_defaults(beam_width=4) == [0.0, 0, 1.0, 0.0, 1.0]
    assert parse_sampling(inference_pb2.SamplingParams(), SamplingDefaults(temperature=0)).temperature == 0


def test_a_default_that_no_request_could_ask_for_is_ignored_and_said(caplog: pytest.LogCaptureFixture):
    for key, values in (
        ("temperature", [-1, math.nan, "0.7", True]),
        ("top_k", [1.5, -1]),
        ("top_p", [0, 1.1]),
        ("min_p", [2]),
        ("repetition_penalty", [0]),
    ):
        for value in values:
            caplog.clear()
            assert read_sampling_defaults({key: value}) == SamplingDefaults()
            assert f"generation_config.json: {key} is out of range" in caplog.text


def test_the_demo_model_is_sampled_as_its_generation_config_says_unless_told_not_to() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    defaults = {
        choice: read_facts(
            CHECKPOINT, names=("demo",), tokenizer=tokenizer, generation_config=choice
        ).sampling_defaults
        for choice in get_args(GenerationConfig)
    }
    assert defaults == {"auto": SamplingDefaults(temperature=0.7), "none": SamplingDefaults()}


def test_sizes_that_gemma_3_leaves_to_transformers_are_known(tmp_path: Path) -> None:
    """Its config.json has the fields of the text part apart, and few of them."""
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    named = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    text = {"model_type": "gemma3_text", "hidden_size": 2560}
    scout = {"model_type": "llama4_text", "max_position_embeddings": 10**7, "vocab_size": 202_048}
    tokenizer = load_tokenizer(CHECKPOINT)
    for fields, context in (
        (text | {"max_position_embeddings": 4096}, 4096),
        (scout | {"hidden_size": 64, "attention_chunk_size": 8192}, 8192),
        (text, 131_072),
    ):
        config = {**named, "eos_token_id": [1, 106], "text_config": fields}
        (tmp_path / "config.json").write_text(json.dumps(config))
        facts = read_facts(tmp_path, names=("gemma",), tokenizer=tokenizer)
        assert facts.max_position_embeddings == context
        assert facts.vocab_size == len(tokenizer)
        assert facts.eos_token_ids == {1, 106, tokenizer.eos_token_id}
