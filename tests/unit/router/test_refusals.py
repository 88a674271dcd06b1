"""Refusals of a whole router over real gRPC: with which code, reason and field, and before which cost."""

import json
import logging
import math
import shutil

import grpc
import pytest
from blockyard.proto.v1 import cluster_pb2, inference_pb2, session_pb2
from blockyard.router.tokenizing.service import TokenizerService

from .fake_worker import FakeWorker, Script
from .rig import (
    FOREVER,
    MODEL,
    Router,
    fields_of,
    is_idle,
    reason_of,
    refused,
    request,
    running_router,
    until,
    worker_of_model,
)

TOO_LARGE = session_pb2.REJECT_REASON_TOO_LARGE
pytestmark = pytest.mark.asyncio(loop_scope="module")


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
async def test_a_bad_field_is_invalid_and_named(router, worker, fields, field):
    for method in (router.inference.Generate, router.inference.GenerateStream):
        error = await refused(method(request(**fields)))
        assert (error.code(), fields_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert worker.submits == []


async def test_a_text_of_many_contexts_is_refused_before_all_is_encoded() -> None:
    wide = worker_of_model("worker-wide", max_model_len=20_000)
    async with running_router() as router, router.workers(wide):
        for call in (
            router.inference.Generate(request("a b " * 250_000)),
            router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt="a b " * 250_000)),
        ):
            error = await refused(call)
            assert reason_of(error) == "CONTEXT_LENGTH_EXCEEDED"
            assert "more than 131072 tokens" in (error.details() or "")
        fits = await router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt="a b " * 50_000))
        assert len(fits.token_ids) > 20_000


async def test_a_prompt_over_the_context_has_a_reason_of_its_own(router: Router, worker: FakeWorker) -> None:
    error = await refused(router.inference.Generate(request("word " * 3000)))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    for length, fits in ((511, True), (512, False)):
        tokens = inference_pb2.GenerateRequest(prompt_token_ids={"ids": [7] * length})
        if fits:
            assert len((await router.inference.Generate(tokens)).token_ids) == 1
        else:
            assert reason_of(await refused(router.inference.Generate(tokens))) == "CONTEXT_LENGTH_EXCEEDED"


async def test_a_prompt_over_the_first_context_of_longrope_is_refused_before_any_worker_has_come(tmp_path):
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    stated = json.loads((tmp_path / "config.json").read_text())
    factors = [1.0] * (stated["head_dim"] // 2)
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    rope |= {"rope_theta": 1e4, "original_max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(stated | {"rope_parameters": rope}))
    async with running_router(model=str(tmp_path)) as router:
        tokens = inference_pb2.GenerateRequest(prompt_token_ids={"ids": [7] * 128})
        error = await refused(router.inference.Generate(tokens, timeout=5))
        assert reason_of(error) == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize(
    ("method", "payloads"),
    [
        ("InferenceService/Generate", ["ff" * 3, "1205fffe", "1202fffe", "", "1005", "f80701"]),
        ("InferenceService/GenerateStream", ["ff" * 3]),
        ("InferenceService/Tokenize", [""]),
        ("InferenceService/Abort", [""]),
        ("InferenceService/Detokenize", ["ff"]),
        ("ClusterService/GetBlockPool", ["ffff"]),
        ("Health/Check", ["ffff"]),
    ],
)
async def test_malformed_bytes_are_invalid_and_never_unknown(router, method, payloads):
    make = router.channel.unary_stream if method.endswith("Stream") else router.channel.unary_unary
    package = "grpc.health.v1" if method.startswith("Health") else "blockyard.v1"
    for raw in payloads:
        error = await refused(make(f"/{package}.{method}")(bytes.fromhex(raw), timeout=5))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(error) in ("MALFORMED_MESSAGE", "INVALID_REQUEST")


async def test_an_unknown_model_is_not_found_and_its_own_name_is_served(router: Router, worker: FakeWorker):
    error = await refused(router.inference.Generate(request(model="other")))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert error.details() == "The model `other` does not exist. Served here: `demo`."
    models = (await router.inference.ListModels(inference_pb2.ListModelsRequest())).models
    assert [(model.id, model.max_model_len, model.block_size) for model in models] == [("demo", 512, 16)]
    assert await router.inference.Generate(request(model="demo"))


async def test_beyond_the_limit_every_call_that_costs_work_is_refused_at_once_with_a_delay(router, worker):
    streams = [router.inference.GenerateStream(request(sampling=FOREVER)) for _ in range(8)]
    for stream in streams:
        await anext(aiter(stream))
    # The streams never end, so a request that waited for one of them would wait for ever.
    for call in (
        router.inference.Generate(request()),
        router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt="x")),
        router.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[300])),
        router.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt="x")),
        router.cluster.ExplainPlacement(cluster_pb2.ExplainPlacementRequest(prompt="x")),
    ):
        error = await refused(call)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
    for stream in streams:
        stream.cancel()
    await until(lambda: worker.num_running == 0)
    await until(lambda: is_idle(router))
    assert await router.inference.Generate(request())
    assert (await router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt="x"))).token_ids


async def test_text_that_no_context_could_hold_never_reaches_the_tokeniser(router, worker, monkeypatch):
    asked: list[object] = []
    monkeypatch.setattr(TokenizerService, "prepare", lambda *arguments, **_: asked.append(arguments))
    huge = "word " * 1_000_000
    for call in (
        router.inference.Generate(inference_pb2.GenerateRequest(prompt=huge)),
        router.inference.Tokenize(inference_pb2.TokenizeRequest(prompt=huge)),
        router.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt=huge)),
    ):
        assert reason_of(await refused(call)) == "CONTEXT_LENGTH_EXCEEDED"
    assert asked == []


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        (Script(fail_after=2), grpc.StatusCode.INTERNAL, "ENGINE_FAILED"),
        (Script(reject=TOO_LARGE), grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_TOO_LARGE"),
    ],
)
async def test_a_workers_failure_has_its_code_and_says_nothing_of_the_request(
    router, caplog, script, code, reason
):
    with caplog.at_level(logging.DEBUG):
        async with router.workers(worker_of_model("a", script=lambda submit: script)):
            error = await refused(router.inference.Generate(request("hunter2")))
    assert (error.code(), reason_of(error)) == (code, reason)
    assert "hunter2" not in (error.details() or "") + caplog.text
