"""Offline generation without a server: text in, text out, stop strings cut exactly."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blockyard.worker.cache.adapter_book import UnknownAdapter
from blockyard.worker.grammar.grammar import Grammar
from blockyard.worker.llm import LLM
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import FinishReason

from .adapters import make_adapter
from .token_engines import DEMO

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO), device="cpu", dtype="float32", kv_cache_memory=2**24, max_model_len=256)


def test_answers_come_in_the_order_of_the_prompts_and_repeat(llm: LLM) -> None:
    prompts = ["def add(a, b):\n", "import os\n", "class Queue:\n"]
    first = llm.generate(prompts, GREEDY)
    assert [answer.text for answer in llm.generate(prompts[::-1], GREEDY)] == [a.text for a in first[::-1]]
    assert all(len(answer.token_ids) == 24 or answer.finish_reason is FinishReason.STOP for answer in first)


def test_a_stop_string_cuts_the_text_where_it_begins(llm: LLM) -> None:
    whole = llm.generate("def add(a, b):\n", GREEDY)[0].text
    stop = whole[7:10]
    answer = llm.generate("def add(a, b):\n", GREEDY, stop=[stop])[0]
    assert answer.text == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)


def test_a_second_call_reuses_the_prefix(llm: LLM) -> None:
    prompt = "def parse(line):\n    " * 12
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].cached_tokens > 0


def test_a_prompt_that_cannot_fit_is_refused_and_the_next_is_served(llm: LLM) -> None:
    with pytest.raises(ValueError, match="fit the context"):
        llm.generate(["short", [5] * 400], GREEDY)
    with pytest.raises(ValueError, match="below"):
        llm.generate([[10**6]], GREEDY)
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        llm.generate([[]], GREEDY)
    assert llm.generate("x = ", GREEDY)[0].token_ids


def test_ignore_eos_and_min_tokens_reach_offline_too(llm: LLM) -> None:
    ending = SamplingParams(temperature=0.0, max_tokens=24, eos_token_ids=frozenset(range(4096)))
    assert len(llm.generate("def add(a, b):\n", ending)[0].token_ids) == 1
    assert len(llm.generate("def add(a, b):\n", ending, ignore_eos=True)[0].token_ids) == 24
    patient = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=10)
    whole = llm.generate("def add(a, b):\n", patient, ignore_eos=True)[0].text
    answer = llm.generate("def add(a, b):\n", patient, stop=[whole[:3]], ignore_eos=True)[0]
    assert len(answer.token_ids) >= 10


def test_a_stop_string_or_stop_token_is_shown_where_asked_for(llm: LLM) -> None:
    prompt = "def add(a, b):\n"
    whole = llm.generate(prompt, GREEDY)[0]
    stop = whole.text[7:10]
    answer = llm.generate(prompt, GREEDY, stop=[stop], include_stop_in_output=True)[0]
    assert answer.text == whole.text[: whole.text.index(stop)] + stop
    token = whole.token_ids[5]
    at_token = replace(GREEDY, stop_token_ids=frozenset({token}))
    shown, hidden = (
        llm.generate(prompt, at_token, include_stop_in_output=is_shown)[0] for is_shown in (True, False)
    )
    assert shown.token_ids == hidden.token_ids
    assert shown.stop_reason == hidden.stop_reason == token
    assert shown.text == hidden.text + llm.tokenizer.decode([token])


def test_several_outputs_stop_each_for_itself(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.5, seed=3, max_tokens=30, n=4, logprobs=1)
    prompts = ["def add(a, b):\n", "import os\n"]
    whole = llm.generate(prompts, sampling)
    assert len({output.token_ids for answer in whole for output in answer.outputs}) == 8
    stop = whole[0].outputs[1].text[4:7]
    cut = llm.generate(prompts, sampling, stop=[stop])
    for before, after in zip(whole, cut, strict=True):
        for output, stopped in zip(before.outputs, after.outputs, strict=True):
            assert stopped.text == output.text.partition(stop)[0]
            assert len(stopped.logprobs) == len(stopped.token_ids) <= 30
            assert stopped.cumulative_logprob == sum(token.logprob for token in stopped.logprobs)
    assert cut[0].outputs[1].stop_reason == stop


def answers(llm: LLM, stop: str, *, is_shown: bool) -> list[tuple[object, ...]]:
    prompts = ["def add(a, b):\n", "import os\n", "class Queue:\n", "x = [", "for i in"]
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=20, n=2)
    found = llm.generate(prompts, sampling, stop=[stop], include_stop_in_output=is_shown)
    return [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for answer in found for o in answer.outputs]


def test_overlapping_steps_show_nothing_behind_a_stop_string() -> None:
    """Where an output forks beside others that decode, a step brings these two tokens each."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24}
    settings |= {"max_model_len": 256, "max_num_seqs": 4}
    alone = LLM(str(DEMO), overlap_steps="off", **settings)
    overlapping = LLM(str(DEMO), overlap_steps="on", **settings)
    for stop in ("\n", "e", "in"):
        for is_shown in (False, True):
            expected = answers(alone, stop, is_shown=is_shown)
            assert answers(overlapping, stop, is_shown=is_shown) == expected, (stop, is_shown)


def test_a_stop_string_within_min_tokens_stops_nothing(llm: LLM) -> None:
    """The router does the same: it does not search the text of the first `min_tokens` tokens."""
    prompt = "def add(a, b):\n"
    sampling = replace(GREEDY, max_tokens=8, min_tokens=8)
    whole = llm.generate(prompt, sampling, ignore_eos=True)[0]
    last = llm.tokenizer.decode(whole.token_ids[-1:])
    answer = llm.generate(prompt, sampling, stop=[last], ignore_eos=True)[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (whole.text, FinishReason.LENGTH, None)
    shorter = replace(sampling, min_tokens=7)
    stopped = llm.generate(prompt, shorter, stop=[last], ignore_eos=True)[0]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, last)


def test_beams_come_with_scores_and_prompts_with_logprobs(llm: LLM) -> None:
    search = SamplingParams(temperature=0.0, max_tokens=10, beam_width=4, n=2)
    best, second = llm.generate("def add(a, b):\n", search)[0].outputs
    assert best.beam_score is not None
    assert second.beam_score is not None
    assert best.beam_score >= second.beam_score
    assert best.text != second.text
    with pytest.raises(ValueError, match="no stop strings"):
        llm.generate("x", search, stop=["y"])
    scored = llm.generate([[5, 6, 7, 8]], replace(GREEDY, prompt_logprobs=0))[0]
    assert [token.token_id for token in scored.prompt_logprobs] == [6, 7, 8]


def test_token_ids_beyond_the_model_are_refused_in_every_list(llm: LLM) -> None:
    for field in ("stop_token_ids", "bad_token_ids", "allowed_token_ids", "eos_token_ids"):
        with pytest.raises(ValueError, match="below"):
            llm.generate("x", replace(GREEDY, **{field: frozenset({10**6})}))
    with pytest.raises(ValueError, match="below"):
        llm.generate("x", replace(GREEDY, logit_bias=((10**6, 1.0),)))


CODE = Grammar(kind="regex", source="[a-f]{3}-[0-9]{2,40}!")
WILD = SamplingParams(seed=2, max_tokens=60, n=3, temperature=2.0)


def test_every_output_follows_a_grammar_and_ends_where_it_is_complete(llm: LLM) -> None:
    answers = llm.generate(["def ", "x = "], WILD, structured_output=CODE)
    outputs = [output for answer in answers for output in answer.outputs]
    assert all(re.fullmatch(CODE.source, output.text) for output in outputs), [o.text for o in outputs]
    assert len({output.text for output in outputs}) == 6
    assert all(output.finish_reason is FinishReason.STOP for output in outputs)


def test_a_grammar_that_cannot_be_followed_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="regular expression cannot be compiled"):
        llm.generate("x", WILD, structured_output=Grammar(kind="regex", source="(a"))
    beams = SamplingParams(temperature=0.0, beam_width=2)
    for sampling, ignore_eos in ((beams, False), (replace(WILD, min_tokens=2), False), (WILD, True)):
        with pytest.raises(ValueError, match="structured output takes no"):
            llm.generate("x", sampling, structured_output=CODE, ignore_eos=ignore_eos)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_grammars_do_not_show_a_preemption(llm: LLM, preempt: str) -> None:
    block_bytes = llm._loaded.kv_size.block_bytes
    texts = []
    for num_blocks in (100, 11):
        small = LLM(
            str(DEMO),
            device="cpu",
            deterministic=True,
            kv_cache_memory=num_blocks * block_bytes,
            max_model_len=96,
            preempt=preempt,
            swap_space_gib=0.01,
        )
        answers = small.generate([[5] * 28, [6] * 28, [7] * 28], WILD, structured_output=CODE)
        texts.append([output.text for answer in answers for output in answer.outputs])
    assert small._engine.scheduler.num_preemptions > 0
    assert texts[0] == texts[1]
    assert all(re.fullmatch(CODE.source, text) for text in texts[1])


def test_a_tokenizer_may_lie_beside_the_model(tmp_path: Path, llm: LLM) -> None:
    bare = shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    other = LLM(
        str(bare),
        tokenizer=str(DEMO),
        device="cpu",
        dtype="float32",
        kv_cache_memory=2**24,
        max_model_len=256,
    )
    assert other.generate("def f(x):", GREEDY)[0].text == llm.generate("def f(x):", GREEDY)[0].text


def test_a_folder_with_another_adapter_is_read_again_and_the_one_before_is_forgotten(tmp_path: Path) -> None:
    settings = {"kv_cache_memory": 2**24, "max_model_len": 64, "max_loras": 1, "adapter_dir": str(tmp_path)}
    llm = LLM(str(DEMO), device="cpu", dtype="float32", **settings)

    def answer() -> tuple[int, ...]:
        return tuple(llm.generate("def add(a, b):\n", GREEDY, adapters=["sql"])[0].token_ids)

    make_adapter(tmp_path / "sql", DEMO, seed=1)
    first = answer()
    assert answer() == first
    before = llm._adapter("sql")
    shutil.rmtree(tmp_path / "sql")
    make_adapter(tmp_path / "sql", DEMO, seed=2)
    assert answer() != first
    with pytest.raises(UnknownAdapter):
        llm._engine.adapters.find(before)
