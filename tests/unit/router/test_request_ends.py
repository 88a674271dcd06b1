"""Requests that end early, over real gRPC: cancelled, aborted, past the deadline, cut off, drained."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from blockyard.proto.runtime.logs import configure_logging
from blockyard.proto.v1 import cluster_pb2, inference_pb2
from blockyard.router.calls.gate import CallGate
from blockyard.router.calls.intake import Intake
from blockyard.router.errors import DeadlinePassed
from blockyard.router.generation.client_buffer import Outbox
from blockyard.router.services.interceptor import BoundaryInterceptor, Context, write

from .fake_worker import FakeWorker, Script, expected_tokens
from .rig import (
    FOREVER,
    Router,
    is_idle,
    is_ready,
    nothing_left_to_the_collector,
    reason_of,
    refused,
    request,
    running_router,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_cancelled_call_ends_on_the_worker_at_once_and_its_id_is_free_again(router, worker):
    stream = router.inference.GenerateStream(request(request_id="same", sampling=FOREVER))
    await anext(aiter(stream))
    error = await refused(router.inference.Generate(request(request_id="same")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    stream.cancel()
    await until(lambda: worker.num_running == 0 and worker.cancelled)
    assert await router.requests() == []
    assert await router.inference.Generate(request(request_id="same"))


async def test_cancelled_calls_leave_nothing_to_the_garbage_collector(
    router: Router, worker: FakeWorker
) -> None:
    # The last may still be on its way out.
    with nothing_left_to_the_collector(Outbox, most=1):
        for _ in range(20):
            stream = router.inference.GenerateStream(request(sampling=FOREVER))
            await anext(aiter(stream))
            stream.cancel()
            await until(lambda: worker.num_running == 0)
        assert await router.requests() == []


async def test_a_deadline_ends_the_call_and_the_work(router: Router, worker: FakeWorker) -> None:
    error = await refused(router.inference.Generate(request(sampling=FOREVER), timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: worker.num_running == 0)
    assert worker.cancelled, "it did not run to its end"
    assert await router.requests() == []


async def test_abort_ends_a_request_with_its_own_reason(router: Router, worker: FakeWorker) -> None:
    stream = router.inference.GenerateStream(request(request_id="mine", sampling=FOREVER))
    await anext(aiter(stream))
    await router.inference.Abort(inference_pb2.AbortRequest(request_id="mine"))
    error = await refused(stream)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.CANCELLED, "ABORTED")
    await until(lambda: worker.num_running == 0)
    assert worker.cancelled, "it did not run to its end"
    error = await refused(router.inference.Abort(inference_pb2.AbortRequest(request_id="mine")))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_questions_about_prompts_end_by_the_servers_own_deadline() -> None:
    async with running_router(default_timeout_seconds=0.3) as own:
        for call in (
            own.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt="x")),
            own.cluster.ExplainPlacement(cluster_pb2.ExplainPlacementRequest(prompt="x")),
        ):
            error = await asyncio.wait_for(refused(call), 60.0)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_stopping_lets_streams_finish_and_refuses_new_ones() -> None:
    async with worker_of_model("a") as worker, running_router(workers=(worker.address,)) as router:
        await until(lambda: is_ready(router))
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
        await until(lambda: is_idle(own), seconds=20)
        await until(lambda: flood.num_running == 0)
        assert flood.cancelled, "the worker was told"
        error = await refused(stream)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")


class Ending(grpc.GenericRpcHandler):
    """Methods that send something to their client at its deadline: an error, messages of a stream, or an answer."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        kind = details.method.rpartition("/")[2]
        if kind == "answer":
            return grpc.unary_unary_rpc_method_handler(self._answer, request_deserializer=bytes)
        behave = self._fail if kind == "error" else self._write
        return grpc.unary_stream_rpc_method_handler(behave, request_deserializer=bytes)

    async def _answer(self, _: bytes, context: Context) -> bytes:
        await asyncio.sleep(context.time_remaining() or 0.0)
        return b""

    async def _fail(self, _: bytes, context: Context) -> None:
        await self._answer(b"", context)
        raise DeadlinePassed("the deadline passed")

    async def _write(self, _: bytes, context: Context) -> None:
        while True:
            await write(context, b"message")
            await asyncio.sleep(0.0)


@pytest.mark.parametrize("kind", ["error", "stream", "answer"])
async def test_what_is_sent_to_a_client_that_is_gone_is_no_error(kind: str, caplog: pytest.LogCaptureFixture):
    """gRPC may report that the sending has failed before it reports the end of the call."""
    configure_logging()
    boundary = BoundaryInterceptor(CallGate(None), Intake(), message_bytes=1000)
    server = grpc.aio.server(interceptors=[boundary])
    server.add_generic_rpc_handlers((Ending(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(2):
            # Many calls with one deadline: then gRPC ends each while the router sends.
            calls = [channel.unary_stream(f"/test.Ending/{kind}")(b"", timeout=0.5) for _ in range(100)]
            codes = {await call.code() for call in calls}
            assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK}
    await server.stop(None)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
