"""InferenceService over real gRPC and the real tokeniser process, before scripted workers."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from blockyard.proto.text import load_tokenizer
from blockyard.proto.v1 import cluster_pb2, inference_pb2, session_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from .fake_worker import FakeWorker, Script, expected_tokens
from .rig import (
    MODEL,
    READY,
    Router,
    fields_of,
    reason_of,
    request,
    running_router,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
FOREVER = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[Router]:
    async with running_router(max_requests=8, slow_reader_seconds=1.0) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def worker(router: Router) -> AsyncIterator[FakeWorker]:
    async with router.workers(worker_of_model("a")) as (only,):
        yield only
        await until(lambda: only.num_running == 0)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call of either kind ends with."""

    async def finish() -> None:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finish()
    return caught.value


async def router_is_ready(router: Router) -> bool:
    return READY in (await router.states()).values()


async def test_a_stream_is_contiguous_and_adds_up_to_the_unary_answer(
    router: Router, worker: FakeWorker, tokenizer: Any
) -> None:
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


async def test_a_stop_string_across_deltas_cuts_exactly_and_cancels_the_worker(
    router: Router, worker: FakeWorker, tokenizer: Any
) -> None:
    tokens = expected_tokens(1, 400)
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    stop = text[17:23]
    shown = ""
    async for message in router.inference.GenerateStream(request(sampling={**FOREVER, "stop": [stop]})):
        shown += message.delta.text
    assert shown == text[: text.find(stop)]
    assert (message.finish.reason, message.finish.stop_reason) == (inference_pb2.FINISH_REASON_STOP, stop)
    await until(lambda: worker.num_running == 0, seconds=0.5)
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


async def test_a_killed_worker_is_a_pause_for_its_clients(router: Router) -> None:
    async with router.workers(worker_of_model("a"), worker_of_model("b")) as workers:
        calls = [
            router.inference.Generate(request(f"# {number}", sampling={"max_tokens": 100, "seed": number}))
            for number in range(8)
        ]
        answers = asyncio.gather(*calls)
        await until(lambda: all(worker.num_running for worker in workers))
        await workers[0].kill()
        for number, answer in enumerate(await answers):
            assert list(answer.token_ids) == expected_tokens(number, 100)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"stop_token_ids": [4096]}}, "sampling.stop_token_ids"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"cache_salt": "a/b"}, "cache_salt"),
    ],
)
async def test_a_bad_field_is_invalid_and_named(
    router: Router, worker: FakeWorker, fields: dict[str, Any], field: str
) -> None:
    for method in (router.inference.Generate, router.inference.GenerateStream):
        error = await refused(method(request(**fields)))
        assert (error.code(), fields_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert worker.submits == []


async def test_a_prompt_over_the_context_has_a_reason_of_its_own(router: Router, worker: FakeWorker) -> None:
    error = await refused(router.inference.Generate(request("word " * 3000)))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    for length, fits in ((511, True), (512, False)):
        tokens = inference_pb2.GenerateRequest(prompt_token_ids={"ids": [7] * length})
        if fits:
            assert len((await router.inference.Generate(tokens)).token_ids) == 1
        else:
            assert reason_of(await refused(router.inference.Generate(tokens))) == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("Generate", b"\xff\xff\xff"),
        ("Generate", b"\x12\x05\xff\xfe"),
        ("Generate", b"\x12\x02\xff\xfe"),
        ("Generate", b""),
        ("Generate", b"\x10\x05"),
        ("Generate", b"\xf8\x07\x01"),
        ("GenerateStream", b"\xff\xff\xff"),
        ("Tokenize", b""),
        ("Abort", b""),
        ("Detokenize", b"\xff"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.hex() or "empty",
)
async def test_malformed_bytes_are_invalid_and_never_unknown(router: Router, method: str, raw: bytes) -> None:
    make = router.channel.unary_stream if method == "GenerateStream" else router.channel.unary_unary
    error = await refused(make(f"/blockyard.v1.InferenceService/{method}")(raw, timeout=5))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) in ("MALFORMED_MESSAGE", "INVALID_REQUEST")


async def test_malformed_bytes_to_health_and_cluster_are_invalid_too(router: Router) -> None:
    for method in ("/grpc.health.v1.Health/Check", "/blockyard.v1.ClusterService/GetBlockPool"):
        error = await refused(router.channel.unary_unary(method)(b"\xff\xff", timeout=5))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_model_is_not_found_and_its_own_name_is_served(
    router: Router, worker: FakeWorker
) -> None:
    error = await refused(router.inference.Generate(request(model="other")))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    models = (await router.inference.ListModels(inference_pb2.ListModelsRequest())).models
    assert [(model.id, model.max_model_len, model.block_size) for model in models] == [("demo", 512, 16)]
    assert await router.inference.Generate(request(model="demo"))


async def test_a_running_id_is_taken_and_free_again_afterwards(router: Router, worker: FakeWorker) -> None:
    stream = router.inference.GenerateStream(request(request_id="same", sampling=FOREVER))
    await anext(aiter(stream))
    error = await refused(router.inference.Generate(request(request_id="same")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    stream.cancel()
    await until(lambda: worker.num_running == 0)
    assert await router.inference.Generate(request(request_id="same"))


async def test_a_cancelled_call_ends_on_the_worker_at_once(router: Router, worker: FakeWorker) -> None:
    stream = router.inference.GenerateStream(request(sampling=FOREVER))
    await anext(aiter(stream))
    stream.cancel()
    await until(lambda: worker.num_running == 0 and worker.cancelled, seconds=0.5)
    assert await router.requests() == []


async def test_a_deadline_ends_the_call_and_the_work(router: Router, worker: FakeWorker) -> None:
    error = await refused(router.inference.Generate(request(sampling=FOREVER), timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: worker.num_running == 0, seconds=0.5)
    assert await router.requests() == []


async def test_abort_ends_a_request_with_its_own_reason(router: Router, worker: FakeWorker) -> None:
    stream = router.inference.GenerateStream(request(request_id="mine", sampling=FOREVER))
    await anext(aiter(stream))
    await router.inference.Abort(inference_pb2.AbortRequest(request_id="mine"))
    error = await refused(stream)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.CANCELLED, "ABORTED")
    await until(lambda: worker.num_running == 0, seconds=0.5)
    error = await refused(router.inference.Abort(inference_pb2.AbortRequest(request_id="mine")))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_beyond_the_limit_requests_are_refused_at_once_with_a_delay(
    router: Router, worker: FakeWorker
) -> None:
    streams = [router.inference.GenerateStream(request(sampling=FOREVER)) for _ in range(8)]
    for stream in streams:
        await anext(aiter(stream))
    started = time.monotonic()
    error = await refused(router.inference.Generate(request()))
    assert time.monotonic() - started < 0.5
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    trailing = dict(error.trailing_metadata())
    assert int(trailing["grpc-retry-pushback-ms"]) > 0
    for stream in streams:
        stream.cancel()
    await until(lambda: worker.num_running == 0)
    assert await router.inference.Generate(request())


async def test_every_call_that_costs_work_is_admitted_like_a_generation(
    router: Router, worker: FakeWorker
) -> None:
    streams = [router.inference.GenerateStream(request(sampling=FOREVER)) for _ in range(8)]
    for stream in streams:
        await anext(aiter(stream))
    for call in (
        router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt="x")),
        router.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[300])),
        router.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt="x")),
        router.cluster.ExplainPlacement(cluster_pb2.ExplainPlacementRequest(prompt="x")),
    ):
        assert reason_of(await refused(call)) == "OVERLOADED"
    for stream in streams:
        stream.cancel()
    await until(lambda: worker.num_running == 0)
    await until(lambda: _is_idle(router))
    assert (await router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt="x"))).token_ids


async def test_questions_about_prompts_end_by_the_servers_own_deadline() -> None:
    async with running_router(default_timeout_seconds=0.3) as own:
        for call in (
            own.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt="x")),
            own.cluster.ExplainPlacement(cluster_pb2.ExplainPlacementRequest(prompt="x")),
        ):
            error = await asyncio.wait_for(refused(call), 3.0)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_text_that_no_context_could_hold_never_reaches_the_tokeniser(
    router: Router, worker: FakeWorker
) -> None:
    huge = "word " * 1_000_000
    for call in (
        router.inference.Generate(inference_pb2.GenerateRequest(prompt=huge)),
        router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt=huge)),
        router.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt=huge)),
    ):
        started = time.monotonic()
        assert reason_of(await refused(call)) == "CONTEXT_LENGTH_EXCEEDED"
        assert time.monotonic() - started < 0.5


async def test_engine_failures_are_internal_and_say_nothing_of_the_request(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    failing = worker_of_model("a", script=lambda submit: Script(fail_after=2))
    with caplog.at_level(logging.DEBUG):
        async with router.workers(failing):
            error = await refused(router.inference.Generate(request("hunter2")))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INTERNAL, "ENGINE_FAILED")
    assert "hunter2" not in (error.details() or "") + caplog.text


async def test_a_request_that_never_fits_is_a_failed_precondition(router: Router) -> None:
    too_large = Script(reject=session_pb2.REJECT_REASON_TOO_LARGE)
    async with router.workers(worker_of_model("a", script=lambda submit: too_large)):
        error = await refused(router.inference.Generate(request()))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_TOO_LARGE")


async def test_health_follows_the_workers(router: Router) -> None:
    stub = health_pb2_grpc.HealthStub(router.channel)
    seen: list[int] = []

    async def watch() -> None:
        async for answer in stub.Watch(
            health_pb2.HealthCheckRequest(service="blockyard.v1.InferenceService")
        ):
            seen.append(answer.status)

    watching = asyncio.create_task(watch())
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
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


async def test_stopping_lets_streams_finish_and_refuses_new_ones() -> None:
    async with worker_of_model("a") as worker, running_router(workers=(worker.address,)) as router:
        await until(lambda: router_is_ready(router))
        stream = router.inference.GenerateStream(request(sampling={"max_tokens": 100}))
        first = await anext(aiter(stream))
        tokens = list(first.delta.token_ids)
        stopping = asyncio.create_task(router.server.stop(5.0))
        await asyncio.sleep(0.02)
        error = await refused(router.inference.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        async for message in stream:
            tokens += message.delta.token_ids
        assert tokens == expected_tokens(1, 100)
        await stopping


async def test_a_client_that_stops_reading_is_cut_off_and_frees_everything() -> None:
    """gRPC itself buffers some megabytes for a stream: so much must be on its way before a write waits."""
    flood = worker_of_model(
        "a", script=lambda submit: Script(tokens_a_step=20_000, step_seconds=0.02), max_model_len=3_000_000
    )
    async with running_router(slow_reader_seconds=0.5) as own, own.workers(flood):
        stream = own.inference.GenerateStream(request(sampling={"max_tokens": 2_900_000}))
        await anext(aiter(stream))
        await until(lambda: _is_idle(own), seconds=20)
        await until(lambda: flood.num_running == 0, seconds=1.0)
        assert flood.cancelled, "the worker was told"
        error = await refused(stream)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")


async def _is_idle(router: Router) -> bool:
    return await router.requests() == []
