"""A worker's session over real gRPC: one stream, columns, merging, rejection, cancellation."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from blockyard.proto.naming.block_hash import chain, pack_tokens, root_name
from blockyard.proto.naming.marks import marks
from blockyard.proto.security.tls import session_channels
from blockyard.proto.v1 import cluster_pb2, session_pb2, session_pb2_grpc
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.proto.v1.session_pb2 import (
    Cancel,
    Continuation,
    EngineSampling,
    Ping,
    RejectReason,
    RowDetails,
    StepOutput,
    Submit,
    ToRouter,
    ToWorker,
)
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.server import WorkerServer

from .checkpoints import shared_checkpoint

SECRET = "hush"
ROOT = root_name(cluster_secret="hush", model_fingerprint="m", block_size=16, kv_dtype="float32")
PATIENCE_SECONDS = 60


@pytest.fixture
async def worker() -> AsyncIterator[WorkerServer]:
    engine = EngineConfig(
        model=str(shared_checkpoint("LlamaForCausalLM")),
        engine="simulated",
        kv_cache_memory=64 * 2 * 3 * 2 * 16 * 16 * 4,
        simulated_step_seconds=0.005,
        max_num_seqs=4,
    )
    server = WorkerServer(WorkerConfig(engine=engine, cluster_secret="hush", max_waiting=2))
    await server.start()
    yield server
    await server.stop(0)


class Session:
    """The router's end of a stream, by hand."""

    def __init__(self, address: str, secret: str = SECRET, options: Any = ()) -> None:
        open_channel = session_channels(None, secret=secret, cluster="default", options=options)
        self.channel = open_channel(address)
        self.stub = session_pb2_grpc.EngineServiceStub(self.channel)
        self.call = self.stub.Session()

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *details: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def read(self) -> ToRouter:
        message = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
        assert isinstance(message, ToRouter), "the stream has ended"
        return message

    async def read_until(self, kind: str) -> Any:
        while True:
            message = await self.read()
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)

    async def submit(self, handle: int, length: int = 20, **changes: Any) -> None:
        tokens = [changes.pop("token", 5)] * length
        sampling = EngineSampling(
            temperature=1.0,
            top_p=1.0,
            max_tokens=changes.pop("max_tokens", 6),
            **({"seed": handle} | changes.pop("sampling", {})),
        )
        submit = Submit(
            handle=handle,
            request_id=f"request-{handle}",
            token_ids=pack_tokens(tokens),
            prompt_tokens=length,
            block_names=b"".join((ROOT, *chain(ROOT, tokens, 16))),
            sampling=sampling,
            pull=changes.pop("pull", None),
        )
        submit.continuations.extend(changes.pop("continuations", ()))
        for name, value in changes.items():
            setattr(submit, name, value)
        await self.call.write(ToWorker(submit=submit))

    async def until_runs(self) -> None:
        """Until its requests have a token: a step may also tell of what was before them."""
        while not (await self.read_until("step")).token_ids:
            pass

    async def tokens_of(self, *handles: int) -> dict[int, list[int]]:
        """Reads until all of them, with one output each, have ended."""
        outputs = await self.outputs_of(*((handle, 0) for handle in handles))
        return {handle: outputs[handle, 0] for handle in handles}

    async def outputs_of(self, *keys: tuple[int, int]) -> dict[tuple[int, int], list[int]]:
        """Reads until these outputs (handle, index) have ended, checking offsets; other outputs are not expected."""
        tokens: dict[tuple[int, int], list[int]] = {key: [] for key in keys}
        self.details: dict[tuple[int, int], list[RowDetails]] = {key: [] for key in keys}
        self.first_offsets: dict[tuple[int, int], int] = {}
        open_keys = set(keys)
        while open_keys:
            step: StepOutput = await self.read_until("step")
            taken = iter(step.token_ids)
            indexes = list(step.indexes) or [0] * len(step.handles)
            row_keys = list(zip(step.handles, indexes, strict=True))
            columns = zip(row_keys, step.token_offsets, step.token_counts, step.finish_reasons, strict=True)
            for key, offset, count, finish_reason in columns:
                first = self.first_offsets.setdefault(key, offset)
                assert offset == first + len(tokens[key])
                tokens[key] += [next(taken) for _ in range(count)]
                if finish_reason:
                    open_keys.remove(key)
            for details in step.details:
                self.details[row_keys[details.row]].append(details)
        return tokens


async def test_hello_comes_first_and_tokens_follow_with_contiguous_offsets(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        hello = await session.read_until("hello")
        assert (hello.worker_id, hello.incarnation) == ("worker-0", worker.incarnation)
        assert (hello.block_size, hello.total_blocks, hello.engine) == (16, 64, "simulated")
        await session.submit(1)
        await session.submit(2, length=40)
        tokens = await session.tokens_of(1, 2)
        assert [len(tokens[1]), len(tokens[2])] == [6, 6]


@pytest.mark.parametrize("secret", ["", "guess"], ids=["plaintext", "another secret"])
async def test_nobody_connects_without_the_clusters_secret(worker: WorkerServer, secret: str) -> None:
    async with Session(worker.address, secret) as session:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("secret", ["", "guess"], ids=["plaintext", "another secret"])
async def test_every_call_needs_the_clusters_secret(worker: WorkerServer, secret: str) -> None:
    methods = session_pb2.DESCRIPTOR.services_by_name["EngineService"].methods
    async with Session(worker.address, secret) as session:
        for method in methods:
            if method.name == "Session":
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await session.channel.unary_unary(f"/blockyard.v1.EngineService/{method.name}")(b"")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, method.name
    assert not worker.is_draining


SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""Else the transport itself takes a few megabytes before a writer waits."""


async def test_a_router_that_reads_slowly_gets_steps_merged(worker: WorkerServer) -> None:
    async with Session(worker.address, options=SMALL_WINDOW) as session:
        await session.read_until("hello")
        for handle in (1, 2):
            await session.submit(handle, max_tokens=240)
        await asyncio.sleep(3.0)
        messages = 0
        received = dict.fromkeys((1, 2), 0)
        while any(count < 240 for count in received.values()):
            step: StepOutput = await session.read_until("step")
            messages += 1
            for handle, count in zip(step.handles, step.token_counts, strict=True):
                received[handle] += count
        assert received == dict.fromkeys((1, 2), 240)
        assert messages < 200, "240 steps came as messages of their own"


async def test_every_router_hears_of_a_prompt_that_has_reached_the_worker(worker: WorkerServer) -> None:
    async with Session(worker.address) as session, Session(worker.address) as other:
        for router in (session, other):
            await router.read_until("hello")
        await session.submit(1, length=300)
        for router in (other, session):
            while not (step := await router.read_until("step")).arrived_marks:
                pass
            assert step.arrived_marks == marks(chain(ROOT, [5] * 300, 16), 16)
            assert step.last_handle == (1 if router is session else 0)
        await session.tokens_of(1)


async def test_a_prompt_that_is_cancelled_uncomputed_is_withdrawn_on_every_router(
    worker: WorkerServer,
) -> None:
    """Four sequences run at most, so the fifth prompt waits. The first is computed, and stays."""
    async with Session(worker.address) as session, Session(worker.address) as other:
        for router in (session, other):
            await router.read_until("hello")
        await session.submit(1, length=140, max_tokens=200)
        await session.until_runs()
        for handle in (2, 3, 4):
            await session.submit(handle, max_tokens=200)
        await session.submit(5, length=300, token=6)
        for handle in (5, 1):
            await session.call.write(ToWorker(cancel=Cancel(handle=handle)))
        for router in (session, other):
            while not (step := await router.read_until("step")).withdrawn_marks:
                pass
            assert step.withdrawn_marks == marks(chain(ROOT, [6] * 300, 16), 16)


async def test_ping_is_answered_with_the_load(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.call.write(ToWorker(ping=Ping(nonce=9)))
        pong = await session.read_until("pong")
        assert (pong.nonce, pong.load.free_blocks) == (9, 64)


async def test_a_router_without_requests_hears_of_load_in_few_messages(worker: WorkerServer) -> None:
    async with Session(worker.address) as busy, Session(worker.address) as watching:
        await watching.read_until("step")
        await busy.submit(1, max_tokens=200)
        await busy.tokens_of(1)
        num_messages, generated = 0, 0
        while generated < 200:
            step = await watching.read_until("step")
            assert not step.handles
            num_messages, generated = num_messages + 1, step.load.generated_tokens
        assert num_messages <= 100, "200 steps came as messages of their own"


async def test_cancel_frees_the_blocks_and_nothing_more_comes(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, max_tokens=400)
        await session.until_runs()
        await session.call.write(ToWorker(cancel=Cancel(handle=1)))
        await until_idle(session.stub)


async def test_the_end_of_a_stream_cancels_its_sequences(worker: WorkerServer) -> None:
    async with Session(worker.address) as other, Session(worker.address) as session:
        await session.submit(1, max_tokens=400)
        await session.until_runs()
        session.call.cancel()
        await until_idle(other.stub)


async def until_idle(stub: Any) -> None:
    for _ in range(200):
        pool = await stub.GetBlockPool(cluster_pb2.GetBlockPoolRequest())
        if not pool.used_blocks and not pool.load.running:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("blocks are still held")


async def test_beyond_the_short_queue_requests_are_rejected_as_busy(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        for handle in range(1, 31):
            await session.submit(handle, max_tokens=200)
        rejected = await session.read_until("rejected")
        assert rejected.reason == RejectReason.REJECT_REASON_BUSY


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": 5000}, "TOO_LARGE"),
        ({"max_tokens": 0}, "INVALID"),
        ({"token_ids": b""}, "INVALID"),
        ({"token_ids": b"\x01\x02\x03"}, "INVALID"),
        ({"token_ids": pack_tokens([272] * 20)}, "INVALID"),
        ({"token_ids": pack_tokens([-1] * 20)}, "INVALID"),
        ({"block_names": b""}, "INVALID"),
        ({"block_names": b"short"}, "INVALID"),
        ({"prompt_tokens": 21}, "INVALID"),
        ({"priority": 1000}, "INVALID"),
        ({"sampling": {"bad_token_ids": [272]}}, "INVALID"),
        ({"sampling": {"n": 2}, "continuations": [Continuation(index=2, token_ids=b"\0\0\0\0")]}, "INVALID"),
        ({"sampling": {"n": 5}}, "TOO_LARGE"),
        ({"sampling": {"structured_output": StructuredOutput(regex="a+")}}, "GRAMMAR"),
    ],
)
async def test_a_bad_submit_is_rejected_and_the_next_one_served(
    worker: WorkerServer, changes: dict[str, Any], reason: str
) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, **changes)
        rejected = await session.read_until("rejected")
        assert RejectReason.Name(rejected.reason) == f"REJECT_REASON_{reason}"
        await session.submit(2)
        await session.tokens_of(2)


async def test_the_outputs_of_a_request_come_apart_under_one_handle(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, sampling={"n": 3})
        await session.submit(2)
        outputs = await session.outputs_of((1, 0), (1, 1), (1, 2), (2, 0))
        assert [len(tokens) for tokens in outputs.values()] == [6] * 4
        assert len({tuple(tokens) for tokens in outputs.values()}) == 4
        await until_idle(session.stub)
        assert worker.stats()["generated_tokens"] == 24


async def test_logprobs_come_with_their_tokens_and_the_prompts_once(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, sampling={"n": 2, "logprobs": 1, "prompt_logprobs": 0})
        outputs = await session.outputs_of((1, 0), (1, 1))
        for key, tokens in outputs.items():
            named = [token.token_id for details in session.details[key] for token in details.logprobs]
            assert named == tokens
        prompts = [[len(d.prompt_logprobs) for d in session.details[1, index]] for index in range(2)]
        assert (sum(prompts[0]), sum(prompts[1])) == (19, 0)
        assert prompts[0][0] == 19


async def test_beams_come_whole_with_their_scores(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, sampling={"n": 2, "beam_width": 3, "length_penalty": 1.0})
        outputs = await session.outputs_of((1, 0), (1, 1))
        assert [len(tokens) for tokens in outputs.values()] == [6, 6]
        (best,), (second,) = session.details[1, 0], session.details[1, 1]
        assert best.beam_score >= second.beam_score
        assert best.beam_score == pytest.approx(best.cumulative_logprob / 6)


async def test_a_replay_of_several_outputs_goes_on_with_each(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, sampling={"n": 3})
        whole = await session.outputs_of((1, 0), (1, 1), (1, 2))
        parts = [Continuation(index=i, token_ids=pack_tokens(whole[1, i][:k])) for i, k in ((0, 2), (2, 5))]
        await session.submit(2, sampling={"n": 3, "seed": 1}, continuations=parts)
        rest = await session.outputs_of((2, 0), (2, 2))
        assert session.first_offsets == {(2, 0): 2, (2, 2): 5}
        assert (rest[2, 0], rest[2, 2]) == (whole[1, 0][2:], whole[1, 2][5:])


async def test_an_output_that_is_cancelled_comes_no_more_and_the_others_end(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, max_tokens=60, sampling={"n": 2})
        await session.until_runs()
        for _ in range(2):
            await session.call.write(ToWorker(cancel=Cancel(handle=1, index=1)))
        ended: dict[int, int] = {}
        while not ended:
            step: StepOutput = await session.read_until("step")
            indexes = list(step.indexes) or [0] * len(step.handles)
            columns = zip(indexes, step.token_offsets, step.finish_reasons, strict=True)
            ended |= {index: offset for index, offset, finish in columns if finish}
        assert ended.keys() == {0}
        await until_idle(session.stub)
        await session.submit(1)
        await session.tokens_of(1)


async def test_bytes_that_are_no_message_are_an_invalid_argument(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        channel = session.channel
        name = session_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
        stream = channel.stream_stream(f"/{name}/Session")()
        await stream.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in stream]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_port_that_is_taken_is_a_clear_error(worker: WorkerServer) -> None:
    port = int(worker.address.rpartition(":")[2])
    second = WorkerServer(dataclasses.replace(worker.config, port=port, host="127.0.0.1"))
    with pytest.raises(ValueError, match="cannot listen"):
        await second.start()
