"""A worker of this process with a tiny checkpoint, and the router's end of its session, by hand."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from blockyard.proto.naming.block_hash import chain, pack_tokens, root_name
from blockyard.proto.security.tls import session_channels
from blockyard.proto.v1 import cluster_pb2, session_pb2_grpc
from blockyard.proto.v1.session_pb2 import (
    EngineSampling,
    RowDetails,
    StepOutput,
    Submit,
    ToRouter,
    ToWorker,
)
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.engine import Engine
from blockyard.worker.server import WorkerServer

from .checkpoints import shared_checkpoint

T = TypeVar("T")
SECRET = "hush"
ROOT = root_name(cluster_secret=SECRET, model_fingerprint="m", block_size=16, kv_dtype="float32")
PATIENCE_SECONDS = 60
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4
KV_BYTES = 64 * BLOCK_BYTES


def engine_settings(**changes: Any) -> EngineConfig:
    """Return the settings of a simulated engine with 64 blocks."""
    model = str(shared_checkpoint("LlamaForCausalLM"))
    return EngineConfig(**({"model": model, "engine": "simulated", "kv_cache_memory": KV_BYTES} | changes))


@asynccontextmanager
async def serving(engine: EngineConfig | None = None, **config: Any) -> AsyncIterator[WorkerServer]:
    settings = {"engine": engine or engine_settings(), "cluster_secret": SECRET} | config
    worker = WorkerServer(WorkerConfig(**settings))
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop(0)


async def in_engine(worker: WorkerServer, command: Callable[[Engine], T]) -> T:
    """Run a command between two steps of the worker's engine."""
    return await asyncio.wrap_future(worker._engine.call(command))


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

    async def write(self, **message: Any) -> None:
        await self.call.write(ToWorker(**message))

    async def read(self) -> ToRouter:
        message = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
        assert isinstance(message, ToRouter), "the stream has ended"
        return message

    async def read_until(self, kind: str) -> Any:
        while True:
            message = await self.read()
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)

    async def step_with(self, holds: Callable[[StepOutput], object]) -> StepOutput:
        """Return the next message about steps of which this holds."""
        while True:
            step: StepOutput = await self.read_until("step")
            if holds(step):
                return step

    async def until_taken(self) -> None:
        """Wait until the worker has taken all messages so far."""
        await self.write(ping={"nonce": 1})
        await self.read_until("pong")

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
        await self.write(submit=submit)

    async def until_runs(self) -> None:
        """Wait until its requests have a token: a step may also tell of what was before them."""
        await self.step_with(lambda step: step.token_ids)

    async def tokens_of(self, *handles: int) -> dict[int, list[int]]:
        """Read until all of them, with one output each, have ended."""
        outputs = await self.outputs_of(*((handle, 0) for handle in handles))
        return {handle: outputs[handle, 0] for handle in handles}

    async def outputs_of(self, *keys: tuple[int, int]) -> dict[tuple[int, int], list[int]]:
        """Read until these outputs (handle, index) have ended. Check offsets. No other outputs are expected."""
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

    async def until_idle(self) -> None:
        """Wait until the worker runs nothing and holds no block."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                pool = await self.stub.GetBlockPool(cluster_pb2.GetBlockPoolRequest())
                if not pool.used_blocks and not pool.load.running:
                    return
                await asyncio.sleep(0.02)


async def assert_refused(call: Awaitable[object], code: grpc.StatusCode) -> str:
    """Assert that a call ends with a status, and return its details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code
    return caught.value.details() or ""
