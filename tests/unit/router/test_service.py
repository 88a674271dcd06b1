"""InferenceService over real gRPC, with the real tokenizer process and scripted workers."""

import asyncio
from typing import Any

import pytest
from blockyard.proto.v1 import inference_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from .fake_worker import FakeWorker, Script, expected_tokens
from .rig import FOREVER, SOON_LOST, Router, request, running_router, until, worker_of_model

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_stream_is_contiguous_and_adds_up_to_the_unary_answer(router, worker, tokenizer):
    tokens, text, last = [], "", None
    async for message in router.inference.GenerateStream(request(request_id="r-1")):
        assert message.request_id == "r-1"
        assert message.delta.token_offset == len(tokens)
        tokens += message.delta.token_ids
        text += message.delta.text
        assert last is None or not last.HasField("finish"), "finish must come last"
        last = message
    assert tokens == expected_tokens(1, 20)
    assert text == tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    finish = last.finish
    assert (finish.reason, finish.seed, finish.worker_id) == (inference_pb2.FINISH_REASON_LENGTH, 1, "a")
    assert (finish.usage.completion_tokens, finish.usage.cached_tokens) == (20, 32)
    assert 0 < finish.timing.time_to_first_token_seconds < finish.timing.total_seconds
    whole = await router.inference.Generate(request())
    assert (list(whole.token_ids), whole.text) == (tokens, text)
    assert whole.finish.usage == finish.usage


async def test_the_worker_gets_the_prompt_as_the_tokenizer_has_it(router: Router, worker: FakeWorker) -> None:
    chat = {"messages": [{"role": "user", "content": "say <|im_start|>system please"}]}
    listed = await router.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    await router.inference.Generate(inference_pb2.GenerateRequest(chat=chat, sampling={"max_tokens": 1}))
    submit = worker.submits[-1]
    assert submit.prompt_tokens == len(listed.token_ids) == len(submit.token_ids) // 4
    assert len(submit.block_names) == 16 * (1 + submit.prompt_tokens // 16)
    assert submit.sampling.max_tokens == 1
    assert 0 < submit.deadline_seconds <= 600
    assert listed.max_model_len == 512


async def test_salts_name_the_same_prompt_differently(router: Router, worker: FakeWorker) -> None:
    prompt = "x = 1\n" * 40
    for salt in ({"cache_salt": "one"}, {"cache_salt": "two"}, {"cache_salt": "one"}):
        await router.inference.Generate(request(prompt, **salt))
    first, second, third = (submit.block_names for submit in worker.submits)
    assert first == third
    assert not {first[i : i + 16] for i in range(0, len(first), 16)} & {
        second[i : i + 16] for i in range(0, len(second), 16)
    }


async def test_a_stop_string_across_deltas_cuts_exactly_and_cancels_the_worker(router, worker, tokenizer):
    tokens = expected_tokens(1, 400)
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    stop = text[17:23]
    shown = ""
    async for message in router.inference.GenerateStream(request(sampling={**FOREVER, "stop": [stop]})):
        shown += message.delta.text
    assert shown == text[: text.find(stop)]
    assert (message.finish.reason, message.finish.stop_reason) == (inference_pb2.FINISH_REASON_STOP, stop)
    await until(lambda: worker.num_running == 0)
    assert worker.cancelled, "it did not run to its end"
    assert message.finish.usage.completion_tokens < 30


@pytest.mark.parametrize(
    ("is_asked_for", "stop_reason"), [(True, str(expected_tokens(1, 5)[-1])), (False, "")]
)
async def test_a_stop_token_has_no_text_and_only_one_asked_for_is_a_reason(
    router: Router, tokenizer: Any, is_asked_for: bool, stop_reason: str
) -> None:
    stopping = worker_of_model("a", script=lambda submit: Script(stop_token_at=5))
    ids = [expected_tokens(1, 5)[-1]] if is_asked_for else []
    async with router.workers(stopping):
        answer = await router.inference.Generate(request(sampling={"stop_token_ids": ids}))
    assert list(answer.token_ids) == expected_tokens(1, 5)
    assert answer.text == tokenizer.decode(expected_tokens(1, 4), clean_up_tokenization_spaces=False)
    assert (answer.finish.reason, answer.finish.stop_reason) == (
        inference_pb2.FINISH_REASON_STOP,
        stop_reason,
    )


async def test_health_follows_the_workers() -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    seen: list[int] = []

    async def watch(stub: Any) -> None:
        wanted = health_pb2.HealthCheckRequest(service="blockyard.v1.InferenceService")
        async for answer in stub.Watch(wanted):
            seen.append(answer.status)

    async with running_router(**SOON_LOST) as router:
        stub = health_pb2_grpc.HealthStub(router.channel)
        watching = asyncio.create_task(watch(stub))
        async with router.workers(worker_of_model("a")) as (worker,):
            await until(lambda: seen[-1:] == [serving])
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == serving
            worker.hang()
            await until(lambda: seen[-1:] == [not_serving])
        watching.cancel()


async def test_reflection_lists_the_services(router: Router) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"blockyard.v1.InferenceService", "blockyard.v1.ClusterService", "grpc.health.v1.Health"} <= names


async def test_detokenize_undoes_tokenize(router: Router) -> None:
    text = "def naïve(x):\n    return x  # ∞"
    tokens = await router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt=text))
    answer = await router.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert answer.text == text
