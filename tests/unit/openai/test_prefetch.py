"""Agents' hints by OpenAI's client: `prefetch` and `expected_pause_seconds`, with a real worker and the demo model."""

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.system.processes import DETERMINISTIC, processes

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with processes(tmp_path_factory.mktemp("hints")) as running:
        worker = running.add_worker("w0", *DETERMINISTIC)
        router = running.add_router("r0", "--http-port", "0", workers=[worker.address])
        running.start(worker, router)
        found = re.search(r"http://(\S+)/v1", router.log_text())
        assert found
        with OpenAI(base_url=f"http://{found[1]}/v1", api_key="none", timeout=60.0, max_retries=0) as made:
            yield made


def chat(client: OpenAI, text: str, *, salt: str, **extra: Any) -> Any:
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": text}],
        max_tokens=12,
        temperature=0,
        extra_body={"cache_salt": salt, **extra},
    )


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("length", [40, 41, 200, 333])
def test_after_a_prefetch_every_full_block_of_the_prompt_is_cached_and_the_tokens_are_the_same(
    client: OpenAI, length: int
) -> None:
    text = "def f(x):\n" + "".join(f"    x += {number}\n" for number in range(length // 8))
    plain = chat(client, text, salt=f"plain-{length}")
    assert cached(plain) == 0
    ahead = chat(client, text, salt=f"ahead-{length}", prefetch=True, session_id="s")
    assert (ahead.choices[0].message.content, ahead.choices[0].finish_reason) == ("", "length")
    assert (ahead.usage.completion_tokens, ahead.usage.prompt_tokens) == (0, plain.usage.prompt_tokens)
    assert cached(ahead) == 0
    after = chat(client, text, salt=f"ahead-{length}", session_id="s")
    assert cached(after) == (plain.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert after.choices[0].message.content == plain.choices[0].message.content


def test_a_prefetch_streams_no_text_and_ends_with_its_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "def g(y):\n" * 20}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"prefetch": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert last.usage is not None
    assert last.usage.completion_tokens == 0


def test_a_message_of_anthropics_api_may_be_a_prefetch_too(client: OpenAI) -> None:
    text = "import os\n" * 30
    asked: Any = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    hints = {"session_id": "s", "expected_pause_seconds": 5}
    with Anthropic(
        base_url=str(client.base_url).removesuffix("/v1/"), api_key="none", max_retries=0
    ) as claude:
        ahead = claude.messages.create(**asked, extra_body={**hints, "prefetch": True})
        assert (ahead.content, ahead.stop_reason, ahead.usage.output_tokens) == ([], "max_tokens", 0)
        with claude.messages.stream(**asked, extra_body={"prefetch": True}) as stream:
            streamed = stream.get_final_message()
        assert (streamed.content, streamed.stop_reason) == ([], "max_tokens")
        after = claude.messages.create(**asked, extra_body=hints)
    assert after.usage.cache_read_input_tokens > 0
    assert after.usage.input_tokens <= BLOCK_TOKENS


def test_a_completion_may_be_a_prefetch_too(client: OpenAI) -> None:
    prompt = "return value " * 20
    client.completions.create(model="demo", prompt=prompt, extra_body={"prefetch": True})
    answer = client.completions.create(model="demo", prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert cached(answer) == (answer.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS > 0


def test_a_session_that_says_when_it_comes_back_gets_the_same_tokens_and_finds_its_blocks(
    client: OpenAI,
) -> None:
    plain = chat(client, "class A:\n" * 20, salt="plain")
    hinted = chat(client, "class A:\n" * 20, salt="hint", session_id="s", expected_pause_seconds=0.5)
    assert hinted.choices[0].message.content == plain.choices[0].message.content
    again = chat(client, "class A:\n" * 20, salt="hint", session_id="s")
    assert cached(again) == (plain.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert again.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"extra_body": {"prefetch": True}, "n": 2}, "n"),
        ({"extra_body": {"prefetch": True, "beam_width": 2}}, "beam_width"),
        ({"extra_body": {"prefetch": True}, "logprobs": True}, "logprobs"),
        ({"extra_body": {"prefetch": 1}}, "prefetch"),
        ({"extra_body": {"expected_pause_seconds": -1}}, "expected_pause_seconds"),
        ({"extra_body": {"expected_pause_seconds": 0}}, "expected_pause_seconds"),
        ({"extra_body": {"expected_pause_seconds": 3601}}, "expected_pause_seconds"),
        ({"extra_body": {"expected_pause_seconds": "5"}}, "expected_pause_seconds"),
    ],
)
def test_what_a_hint_cannot_mean_is_refused_by_name(
    client: OpenAI, asked: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}], **asked)
    assert field in str(caught.value.param)
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="demo", prompt="x", echo=True, extra_body={"prefetch": True})
