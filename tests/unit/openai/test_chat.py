"""/v1/chat/completions with OpenAI's own client: whole and streamed."""

from typing import Any

import pytest
from openai import AsyncOpenAI

from .rig import (
    HELLO,
    FakeWorker,
    Gateway,
    Script,
    expected_logprob,
    expected_text,
    expected_tokens,
    text_of,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def chunks_of(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_an_answer_has_text_usage_and_the_calls_id(client: AsyncOpenAI, worker: FakeWorker) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="demo", messages=HELLO, max_tokens=12, seed=3, extra_headers={"X-Request-Id": "mine-1"}
    )
    answer = raw.parse()
    assert answer.choices[0].message.content == expected_text(3, 12)
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "length")
    assert (answer.id, answer.object, answer.model) == ("chatcmpl-mine-1", "chat.completion", "demo")
    assert raw.headers["x-request-id"] == "mine-1" == worker.submits[0].request_id
    usage = answer.usage
    assert usage.completion_tokens == 12
    assert usage.prompt_tokens == worker.submits[0].prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert usage.prompt_tokens_details.cached_tokens == 32


async def test_a_stream_adds_up_to_the_same_text_and_ends_with_its_usage_if_asked(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    stream = await client.chat.completions.create(
        model="demo",
        messages=HELLO,
        max_tokens=40,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = await chunks_of(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected_text(3, 40)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        "length"
    ]
    assert {chunk.usage for chunk in chunks} == {None}
    assert (last.choices, last.usage.completion_tokens) == ([], 40)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    without = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=4, stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in await chunks_of(without))


async def test_n_outputs_have_an_index_each_whole_and_streamed(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    expected = [expected_text(5, 10, index) for index in range(3)]
    answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=10, seed=5, n=3)
    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 30
    assert answer.usage.prompt_tokens == worker.submits[0].prompt_tokens
    stream = await client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=10, seed=5, n=3, stream=True
    )
    texts = dict.fromkeys(range(3), "")
    for chunk in await chunks_of(stream):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == expected


async def test_usage_in_every_chunk_counts_the_call_so_far(client: AsyncOpenAI, worker: FakeWorker) -> None:
    asked = {"model": "demo", "messages": HELLO, "max_tokens": 30, "n": 2, "stream": True}
    both = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await chunks_of(await client.chat.completions.create(**asked, stream_options=both))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 60
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {worker.submits[0].prompt_tokens}
    assert {chunk.usage.prompt_tokens_details.cached_tokens for chunk in chunks} == {32}
    assert (last.choices, last.usage) == ([], chunks[-1].usage)
    alone = {"continuous_usage_stats": True}
    without = await chunks_of(await client.chat.completions.create(**asked, stream_options=alone))
    assert all(chunk.choices and chunk.usage is None for chunk in without)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_name_each_token_by_text_and_bytes(
    client: AsyncOpenAI, worker: FakeWorker, stream: bool
) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=30, seed=2, logprobs=True, top_logprobs=3, stream=stream
    )
    choices = [chunk.choices[0] for chunk in await chunks_of(answer)] if stream else [answer.choices[0]]
    content = [entry for choice in choices for entry in choice.logprobs.content]
    tokens = expected_tokens(2, 30)
    assert [entry.logprob for entry in content] == [expected_logprob(token) for token in tokens]
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == text_of(tokens)
    assert {len(entry.top_logprobs) for entry in content} == {3}
    # Special tokens, which have no text.
    assert content[0].top_logprobs[0].bytes is None


async def test_what_every_parameter_says_reaches_the_worker(client: AsyncOpenAI, worker: FakeWorker) -> None:
    openais = {"temperature": 0.5, "top_p": 0.75, "presence_penalty": 0.25, "frequency_penalty": -0.5}
    ours = {"top_k": 40, "min_p": 0.125, "repetition_penalty": 1.25, "min_tokens": 2}
    lists = {"stop_token_ids": [5], "bad_token_ids": [6]}
    await client.chat.completions.create(
        model="demo",
        messages=HELLO,
        max_completion_tokens=7,
        logit_bias={"300": 5},
        seed=9,
        user="somebody",
        **openais,
        extra_body={**ours, **lists, "ignore_eos": True, "priority": -3},
    )
    submit = worker.submits[0]
    sampling = submit.sampling
    assert {name: getattr(sampling, name) for name in (*openais, *ours)} == {**openais, **ours}
    assert {name: list(getattr(sampling, name)) for name in lists} == lists
    assert (sampling.max_tokens, sampling.seed, submit.priority) == (7, 9, -3)
    assert (dict(sampling.logit_bias), list(sampling.eos_token_ids)) == ({300: 5.0}, [])


async def test_a_stop_text_ends_the_answer_and_is_named(client: AsyncOpenAI, worker: FakeWorker) -> None:
    whole = expected_text(3, 40)
    stop = whole[20:24]
    answer = await client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=40, seed=3, stop=stop
    )
    choice = answer.choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "json_schema"),
        ({"extra_body": {"regex": "a+"}}, "regex"),
        ({"extra_body": {"json_schema": {"type": "object"}}}, "json_schema"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "json_schema"),
        ({"extra_body": {"guided_json": '{"type": "object"}'}}, "json_schema"),
        ({"extra_body": {"guided_regex": "a+"}}, "regex"),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, "regex"),
        ({"extra_body": {"structured_outputs": {"json": {}, "regex": None}}}, "json_schema"),
        ({"extra_body": {"structured_outputs": {"regex": "a+", "disable_fallback": True}}}, "regex"),
        ({"extra_body": {"structured_outputs": {"choice": ["yes"]}}}, "regex"),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, "json_object"),
    ],
)
async def test_structured_output_is_asked_for_in_openais_way_and_ours(
    client: AsyncOpenAI, worker: FakeWorker, asked: dict[str, Any], expected: str
) -> None:
    await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=4, **asked)
    assert (worker.submits[0].sampling.structured_output.WhichOneof("kind") or "") == expected


async def test_parts_of_text_and_developers_are_rendered_as_one_text_and_system(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two"}]
    parts = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "one ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "two"},
            ],
        },
    ]
    for messages in (plain, parts):
        await client.chat.completions.create(model="demo", messages=messages, max_tokens=1)
    one, other = worker.submits
    assert one.token_ids == other.token_ids


async def test_an_answer_can_be_sent_back_as_it_came(client: AsyncOpenAI, worker: FakeWorker) -> None:
    answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=4)
    said = answer.choices[0].message.model_dump()
    await client.chat.completions.create(model="demo", messages=[*HELLO, said, *HELLO], max_tokens=1)


async def test_a_worker_that_dies_within_a_stream_costs_no_token_and_doubles_none(gateway: Gateway) -> None:
    deaths = iter([Script(die_after=10)])
    workers = [worker_of_model(worker_id, script=lambda submit: next(deaths, Script())) for worker_id in "ab"]
    async with gateway.router.workers(*workers), gateway.client() as client:
        for seed in range(4):
            stream = await client.chat.completions.create(
                model="demo", messages=HELLO, max_tokens=60, seed=seed, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == expected_text(seed, 60)
            if seed == 0:
                assert [len(worker.submits) for worker in workers] == [1, 1], "nobody died"
    assert sum(len(worker.submits) for worker in workers) == 5
