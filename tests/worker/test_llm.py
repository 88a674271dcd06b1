"""Offline generation without a server: text in, text out, stop strings cut exactly."""

from pathlib import Path

import pytest
from blockyard.worker.llm import LLM
from blockyard.worker.sequence import FinishReason, SamplingParams

DEMO = Path(__file__).parents[2] / "deploy/demo_model/checkpoint"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO), device="cpu", kv_cache_memory=2**24, max_model_len=256)


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
