"""A worker's session over real gRPC: one stream, columns, merging, rejection, cancellation."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.naming.marks import marks
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.proto.v1.session_pb2 import Continuation, RejectReason, StepOutput
from blockyard.worker.server import WorkerServer

from .serving import ROOT, Session, assert_refused, engine_settings, serving


@pytest.fixture
async def worker() -> AsyncIterator[WorkerServer]:
    engine = engine_settings(simulated_step_seconds=0.005, max_num_seqs=4)
    async with serving(engine, max_waiting=2) as worker:
        yield worker


@pytest.fixture
async def session(worker: WorkerServer) -> AsyncIterator[Session]:
    async with Session(worker.address) as session:
        yield session


@pytest.fixture
async def other(worker: WorkerServer) -> AsyncIterator[Session]:
    async with Session(worker.address) as other:
        yield other


async def test_hello_comes_first_and_tokens_follow_with_contiguous_offsets(
    worker: WorkerServer, session: Session
) -> None:
    hello = (await session.read()).hello
    assert (hello.worker_id, hello.incarnation) == ("worker-0", worker.incarnation)
    assert (hello.block_size, hello.total_blocks, hello.engine) == (16, 64, "simulated")
    await session.write(ping={"nonce": 9})
    pong = await session.read_until("pong")
    assert (pong.nonce, pong.load.free_blocks) == (9, 64)
    await session.submit(1)
    await session.submit(2, length=40)
    assert [len(tokens) for tokens in (await session.tokens_of(1, 2)).values()] == [6, 6]


@pytest.mark.parametrize("secret", ["", "guess"], ids=["plaintext", "another secret"])
async def test_every_call_needs_the_clusters_secret(worker: WorkerServer, secret: str) -> None:
    methods = session_pb2.DESCRIPTOR.services_by_name["EngineService"].methods
    async with Session(worker.address, secret) as session:
        await assert_refused(session.call.read(), grpc.StatusCode.UNAVAILABLE)
        for method in methods:
            if method.name != "Session":
                call = session.channel.unary_unary(f"/blockyard.v1.EngineService/{method.name}")(b"")
                await assert_refused(call, grpc.StatusCode.UNAVAILABLE)
    assert not worker.is_draining


SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""Else the transport itself takes a few megabytes before a writer waits."""


async def test_a_router_that_reads_slowly_gets_steps_merged(worker: WorkerServer) -> None:
    async with Session(worker.address, options=SMALL_WINDOW) as session:
        await session.read_until("hello")
        for handle in (1, 2):
            await session.submit(handle, max_tokens=240)
        await asyncio.sleep(2.0)
        messages, received = 0, {1: 0, 2: 0}
        while any(count < 240 for count in received.values()):
            step: StepOutput = await session.read_until("step")
            messages += 1
            for handle, count in zip(step.handles, step.token_counts, strict=True):
                received[handle] += count
        assert received == {1: 240, 2: 240}
        assert messages < 200, "240 steps came as messages of their own"


async def test_every_router_hears_of_a_prompt_that_arrives_and_of_one_cancelled_uncomputed(
    session: Session, other: Session
) -> None:
    """Four sequences run at most, so the fifth prompt waits. The first is computed, and stays."""
    for router in (session, other):
        await router.read_until("hello")
    await session.submit(1, length=300, max_tokens=200)
    for router in (other, session):
        step = await router.step_with(lambda step: step.arrived_marks)
        assert step.arrived_marks == marks(chain(ROOT, [5] * 300, 16), 16)
        assert step.last_handle == (1 if router is session else 0)
    await session.until_runs()
    for handle in (2, 3, 4):
        await session.submit(handle, max_tokens=200)
    await session.submit(5, length=300, token=6)
    for handle in (5, 1):
        await session.write(cancel={"handle": handle})
    for router in (session, other):
        step = await router.step_with(lambda step: step.withdrawn_marks)
        assert step.withdrawn_marks == marks(chain(ROOT, [6] * 300, 16), 16)


@pytest.mark.parametrize("ends", ["cancel", "stream"])
async def test_a_cancel_and_the_end_of_a_stream_free_the_blocks(
    session: Session, other: Session, ends: str
) -> None:
    await session.submit(1, max_tokens=400)
    await session.until_runs()
    if ends == "cancel":
        await session.write(cancel={"handle": 1})
    else:
        session.call.cancel()
    await other.until_idle()


async def test_beyond_the_short_queue_requests_are_rejected_as_busy(session: Session) -> None:
    for handle in range(1, 31):
        await session.submit(handle, max_tokens=200)
    rejected = await session.read_until("rejected")
    assert rejected.reason == RejectReason.REJECT_REASON_BUSY


BAD_SUBMITS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_tokens": 5000}, "TOO_LARGE"),
    ({"max_tokens": 0}, "INVALID"),
    ({"token_ids": b""}, "INVALID"),
    ({"token_ids": pack_tokens([272] * 20)}, "INVALID"),
    ({"sampling": {"n": 2}, "continuations": [Continuation(index=2, token_ids=b"\0\0\0\0")]}, "INVALID"),
    ({"sampling": {"n": 5}}, "TOO_LARGE"),
    ({"sampling": {"structured_output": StructuredOutput(regex="a+")}}, "GRAMMAR"),
)


async def test_a_bad_submit_is_rejected_and_the_next_one_served(session: Session) -> None:
    for handle, (changes, reason) in enumerate(BAD_SUBMITS, start=1):
        await session.submit(handle, **changes)
        rejected = await session.read_until("rejected")
        assert (rejected.handle, RejectReason.Name(rejected.reason)) == (handle, f"REJECT_REASON_{reason}")
        await session.submit(100 + handle)
        await session.tokens_of(100 + handle)


async def test_the_outputs_of_a_request_come_apart_and_a_replay_goes_on_with_each(
    worker: WorkerServer, session: Session
) -> None:
    await session.submit(1, sampling={"n": 3})
    await session.submit(2)
    whole = await session.outputs_of((1, 0), (1, 1), (1, 2), (2, 0))
    assert [len(tokens) for tokens in whole.values()] == [6] * 4
    assert len({tuple(tokens) for tokens in whole.values()}) == 4
    await session.until_idle()
    assert worker.stats()["generated_tokens"] == 24
    parts = [Continuation(index=i, token_ids=pack_tokens(whole[1, i][:k])) for i, k in ((0, 2), (2, 5))]
    await session.submit(3, sampling={"n": 3, "seed": 1}, continuations=parts)
    rest = await session.outputs_of((3, 0), (3, 2))
    assert session.first_offsets == {(3, 0): 2, (3, 2): 5}
    assert (rest[3, 0], rest[3, 2]) == (whole[1, 0][2:], whole[1, 2][5:])


async def test_logprobs_come_with_their_tokens_and_the_prompts_once(session: Session) -> None:
    await session.submit(1, sampling={"n": 2, "logprobs": 1, "prompt_logprobs": 0})
    outputs = await session.outputs_of((1, 0), (1, 1))
    for key, tokens in outputs.items():
        named = [token.token_id for details in session.details[key] for token in details.logprobs]
        assert named == tokens
    prompts = [[len(d.prompt_logprobs) for d in session.details[1, index]] for index in range(2)]
    assert (prompts[0][0], sum(prompts[0]), sum(prompts[1])) == (19, 19, 0)


async def test_beams_come_whole_with_their_scores(session: Session) -> None:
    await session.submit(1, sampling={"n": 2, "beam_width": 3, "length_penalty": 1.0})
    outputs = await session.outputs_of((1, 0), (1, 1))
    assert [len(tokens) for tokens in outputs.values()] == [6, 6]
    (best,), (second,) = session.details[1, 0], session.details[1, 1]
    assert best.beam_score >= second.beam_score
    assert best.beam_score == pytest.approx(best.cumulative_logprob / 6)


async def test_an_output_that_is_cancelled_comes_no_more_and_the_others_end(session: Session) -> None:
    await session.submit(1, max_tokens=60, sampling={"n": 2})
    await session.until_runs()
    for _ in range(2):
        await session.write(cancel={"handle": 1, "index": 1})
    step = await session.step_with(lambda step: any(step.finish_reasons))
    indexes = list(step.indexes) or [0] * len(step.handles)
    ended = {index for index, reason in zip(indexes, step.finish_reasons, strict=True) if reason}
    assert ended == {0}
    await session.until_idle()
    await session.submit(1)
    await session.tokens_of(1)


async def test_bytes_that_are_no_message_are_an_invalid_argument(session: Session) -> None:
    stream = session.channel.stream_stream("/blockyard.v1.EngineService/Session")()
    await stream.write(b"\xff\xff\xff")

    async def read_all() -> None:
        async for _ in stream:
            pass

    await assert_refused(read_all(), grpc.StatusCode.INVALID_ARGUMENT)


async def test_a_port_that_is_taken_is_a_clear_error(worker: WorkerServer) -> None:
    port = int(worker.address.rpartition(":")[2])
    second = WorkerServer(dataclasses.replace(worker.config, port=port, host="127.0.0.1"))
    with pytest.raises(ValueError, match="cannot listen"):
        await second.start()
