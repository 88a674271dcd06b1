"""/v1/completions, /v1/models and /health."""

import pytest
from blockyard.proto.naming.block_hash import unpack_tokens
from blockyard.proto.text import load_tokenizer
from blockyard.proto.v1 import inference_pb2
from openai import AsyncOpenAI, NotFoundError

from .rig import (
    COMPLETIONS,
    HELLO,
    MODEL,
    FakeWorker,
    Gateway,
    Script,
    expected_logprob,
    expected_text,
    expected_tokens,
    running_gateway,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_prompt_may_be_text_or_tokens(client: AsyncOpenAI, worker: FakeWorker) -> None:
    text = await client.completions.create(model="demo", prompt="def f(x):", max_tokens=9, seed=4)
    ids = await client.completions.create(model="demo", prompt=[11, 12, 13], max_tokens=9, seed=4)
    for answer in (text, ids):
        assert answer.choices[0].text == expected_text(4, 9)
        assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
    assert unpack_tokens(worker.submits[1].token_ids) == [11, 12, 13]
    assert (await client.completions.create(model="demo", prompt="x")).usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_one_answer_with_an_index_for_each_output(
    client: AsyncOpenAI, worker: FakeWorker, stream: bool
) -> None:
    wanted = {"model": "demo", "prompt": ["a", "b b b b", [7, 8]], "n": 2, "max_tokens": 6, "seed": 1}
    texts = dict.fromkeys(range(6), "")
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.completions.create(**wanted, **options)]
        usage = chunks[-1].usage
        for chunk in chunks[:-1]:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = await client.completions.create(**wanted)
        usage = answer.usage
        texts |= {choice.index: choice.text for choice in answer.choices}
    assert texts == {index: expected_text(1, 6, index % 2) for index in range(6)}
    assert usage.completion_tokens == 36
    assert usage.prompt_tokens == sum(submit.prompt_tokens for submit in worker.submits)
    assert usage.prompt_tokens_details.cached_tokens == 3 * 32
    assert len({submit.request_id for submit in worker.submits}) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_in_the_older_shape_with_the_place_of_each_token(
    client: AsyncOpenAI, worker: FakeWorker, stream: bool
) -> None:
    answer = await client.completions.create(
        model="demo", prompt="x", max_tokens=20, seed=6, logprobs=2, stream=stream
    )
    choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    text = "".join(choice.text for choice in choices)
    for token, offset in zip(tokens, offsets, strict=True):
        assert text[offset : offset + len(token)] == token
    assert [value for choice in choices for value in choice.logprobs.token_logprobs] == [
        expected_logprob(token) for token in expected_tokens(6, 20)
    ]
    assert all(len(top) == 2 for choice in choices for top in choice.logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompts_and_outputs_are_told_where_vllm_tells_them(
    gateway: Gateway, client: AsyncOpenAI, worker: FakeWorker, stream: bool
) -> None:
    asked = {"model": "demo", "max_tokens": 6, "seed": 2, "n": 2, "stream": stream}
    asked["extra_body"] = {"return_token_ids": True}
    answer = await client.completions.create(prompt=[[7, 8], [9]], **asked)
    chunks = [chunk async for chunk in answer] if stream else [answer]
    tokens = {index: list[int]() for index in range(4)}
    prompts = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        tokens[choice.index] += choice.token_ids
        if "prompt_token_ids" in choice.model_extra:
            assert choice.index not in prompts
            prompts[choice.index] = choice.prompt_token_ids
    assert tokens == {index: expected_tokens(2, 6, index % 2) for index in range(4)}
    assert prompts == {0: [7, 8], 1: [7, 8], 2: [9], 3: [9]}
    answer = await client.chat.completions.create(messages=HELLO, **asked)
    chunks = [chunk async for chunk in answer] if stream else [answer]
    told = [chunk.prompt_token_ids for chunk in chunks if "prompt_token_ids" in chunk.model_extra]
    assert told == [unpack_tokens(worker.submits[-1].token_ids)]
    assert not any("prompt_token_ids" in choice.model_extra for chunk in chunks for choice in chunk.choices)


async def test_a_long_prompt_is_cut_to_its_last_tokens_if_asked(gateway: Gateway, worker: FakeWorker) -> None:
    long = list(range(20, 620))
    for asked, kept in ((5, 5), (-1, 512 - 16), (10_000, None)):
        answer = await gateway.post(
            {"prompt": long, "max_tokens": 16, "truncate_prompt_tokens": asked}, COMPLETIONS
        )
        if kept is None:
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        else:
            assert answer.status == 200
            assert unpack_tokens(worker.submits[-1].token_ids) == long[-kept:]
    again = await gateway.post({"prompt": long[-5:], "max_tokens": 16}, COMPLETIONS)
    assert again.status == 200
    assert worker.submits[-1].block_names == worker.submits[0].block_names
    refused = await gateway.post({"prompt": long, "truncate_prompt_tokens": 0}, COMPLETIONS)
    assert (refused.status, refused.error["param"]) == (400, "truncate_prompt_tokens")


async def test_words_of_one_token_are_banned_and_longer_ones_refused(
    gateway: Gateway, worker: FakeWorker
) -> None:
    tokenizer = load_tokenizer(MODEL)
    banned = {*tokenizer.encode("def"), *tokenizer.encode(" def")}
    assert len(banned) == 2
    answer = await gateway.post({"prompt": "x", "bad_words": ["def"], "bad_token_ids": [9]}, COMPLETIONS)
    assert answer.status == 200
    assert set(worker.submits[0].sampling.bad_token_ids) == {*banned, 9}
    refused = await gateway.post({"prompt": "x", "bad_words": ["supercalifragilistic"]}, COMPLETIONS)
    assert (refused.status, refused.error["param"]) == (400, "bad_words")
    assert "one token" in refused.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_are_told_if_asked(client: AsyncOpenAI, gateway: Gateway, stream: bool) -> None:
    start, space = load_tokenizer(MODEL).encode("<|im_start|> a")[:2]
    special = worker_of_model("a", script=lambda submit: Script(tokens=(start, space, start, start)))
    async with gateway.router.workers(special):
        for skip, text in ((True, ""), (False, "<|im_start|>")):
            asked = {"prompt": "x", "max_tokens": 4, "logprobs": 0, "stream": stream}
            extra = {"skip_special_tokens": skip}
            answer = await client.completions.create(model="demo", **asked, extra_body=extra)
            choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
            whole = "".join(choice.text for choice in choices)
            assert whole.replace(" a", "") == text * 3
            offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
            assert offsets[1] == len(text)


async def test_models_are_listed_and_found_by_name(client: AsyncOpenAI, worker: FakeWorker) -> None:
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["demo"]
    assert (await client.models.retrieve("demo")).max_model_len == 512
    with pytest.raises(NotFoundError) as caught:
        await client.models.retrieve("gpt-99")
    assert caught.value.code == "model_not_found"


async def test_requests_may_use_each_name_of_the_model_and_answers_have_the_first() -> None:
    async with (
        running_gateway(model_names=("acme/demo", "demo")) as gateway,
        gateway.router.workers(worker_of_model("a")),
        gateway.client() as client,
    ):
        for name in ("acme/demo", "demo"):
            answer = await client.completions.create(model=name, prompt="x", max_tokens=2)
            assert answer.model == "acme/demo"
            assert (await client.models.retrieve(name)).id == "acme/demo"
            wanted = inference_pb2.TokenizeRequest(model=name, prompt="x")
            assert (await gateway.router.inference.Tokenize(wanted)).token_ids
        assert [model.id for model in (await client.models.list()).data] == ["acme/demo", "demo"]
        listed = await gateway.router.inference.ListModels(inference_pb2.ListModelsRequest())
        models = {model.id: model.max_model_len for model in listed.models}
        assert models == {"acme/demo": 512, "demo": 512}
        with pytest.raises(NotFoundError):
            await client.completions.create(model="acme", prompt="x")


async def test_health_says_whether_anybody_could_serve(gateway: Gateway) -> None:
    assert (await gateway.get("/health")).status == 503
    async with gateway.router.workers(worker_of_model("a")):
        assert (await gateway.get("/health")).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 9])
async def test_an_echo_puts_the_prompt_and_how_likely_it_was_before_the_output(
    client: AsyncOpenAI, worker: FakeWorker, stream: bool, max_tokens: int
) -> None:
    """lm-eval-harness asks like this, and takes the log-probability of each token of the prompt but the first."""
    prompt = "def f(x):\n    return x"
    answer = await client.completions.create(
        model="demo", prompt=prompt, max_tokens=max_tokens, seed=4, logprobs=2, echo=True, stream=stream
    )
    choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    assert text == prompt + (expected_text(4, max_tokens) if max_tokens else "")
    tokens, logprobs, tops, offsets = (
        [value for choice in choices for value in getattr(choice.logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    (submit,) = worker.submits
    prompt_ids = unpack_tokens(submit.token_ids)
    assert len(tokens) == len(logprobs) == len(prompt_ids) + max_tokens
    assert (logprobs[0], tops[0]) == (None, None)
    assert logprobs[1 : len(prompt_ids)] == [
        pytest.approx(expected_logprob(token_id)) for token_id in prompt_ids[1:]
    ]
    assert all(top for top in tops[1:])
    assert all(
        text[offset : offset + len(token)] == token for token, offset in zip(tokens, offsets, strict=True)
    )
    assert choices[-1].finish_reason == "length"


async def test_an_echo_of_tokens_and_of_several_prompts_is_their_text(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    ids = load_tokenizer(MODEL)("import os").input_ids
    answer = await client.completions.create(
        model="demo", prompt=["a b", "c d e"], n=2, max_tokens=0, echo=True
    )
    assert [choice.text for choice in answer.choices] == ["a b", "a b", "c d e", "c d e"]
    assert answer.usage.completion_tokens == 0
    assert all(choice.logprobs is None for choice in answer.choices)
    assert not any("prompt_token_ids" in (choice.model_extra or ()) for choice in answer.choices)
    shown = await client.completions.create(
        model="demo", prompt=[ids], max_tokens=2, seed=3, echo=True, extra_body={"return_token_ids": True}
    )
    (choice,) = shown.choices
    assert choice.text == "import os" + expected_text(3, 2)
    assert choice.model_extra["prompt_token_ids"] == ids
    assert choice.model_extra["token_ids"] == expected_tokens(3, 2, 0)


async def test_an_echo_of_a_truncated_prompt_is_what_was_kept(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    asked = {"prompt": "one two three four", "max_tokens": 0, "echo": True}
    answer = await client.completions.create(model="demo", **asked, extra_body={"truncate_prompt_tokens": 2})
    kept = unpack_tokens(worker.submits[0].token_ids)
    assert (len(kept), answer.choices[0].text) == (2, load_tokenizer(MODEL).decode(kept))


async def test_what_ends_the_token_that_nobody_sees_is_not_told(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    answer = await client.completions.create(
        model="demo", prompt="x", max_tokens=0, seed=4, stop=expected_text(4, 1)[:1], echo=True
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.model_extra["stop_reason"]) == ("x", "length", None)
