"""Adapters of a worker over real gRPC: added, listed, used, replaced and removed."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from blockyard.proto.v1.admin_pb2 import AddAdapterRequest, ListAdaptersRequest, RemoveAdapterRequest
from blockyard.proto.v1.session_pb2 import RejectReason
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.server import WorkerServer
from safetensors.torch import save_file

from .adapters import make_adapter
from .checkpoints import shared_checkpoint
from .serving import Session

CHECKPOINT = "LlamaForCausalLM"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        make_adapter(tmp_path / "adapters" / name, shared_checkpoint(CHECKPOINT), seed=len(name))
    return tmp_path / "adapters"


@pytest.fixture
async def worker(folder: Path) -> AsyncIterator[WorkerServer]:
    server = await started(max_loras=2, adapter_dir=str(folder))
    yield server
    await server.stop(0)


async def started(**settings: Any) -> WorkerServer:
    engine = EngineConfig(
        model=str(shared_checkpoint(CHECKPOINT)),
        device="cpu",
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory=64 * 2 * 3 * 2 * 16 * 16 * 4,
        **settings,
    )
    server = WorkerServer(WorkerConfig(engine=engine, cluster_secret="hush"))
    await server.start()
    return server


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_an_added_adapter_serves_requests_and_is_reported(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        hello = await session.read_until("hello")
        assert (hello.max_loras, list(hello.load.adapters)) == (2, [])
        added = (await session.stub.AddAdapter(AddAdapterRequest(name="a", path="first"))).adapter
        assert (added.name, added.path, added.rank, len(added.fingerprint)) == ("a", "first", 4, 32)
        await session.submit(1, length=9, sampling={"top_k": 1})
        await session.submit(
            2, length=9, sampling={"top_k": 1}, lora_name="a", lora_fingerprint=added.fingerprint
        )
        tokens = await session.tokens_of(1, 2)
        assert tokens[1] != tokens[2]
        (resident,) = worker._loaded.engine.load().adapters
        assert (resident.fingerprint, resident.running) == (added.fingerprint, 0)
        assert resident.load_seconds > 0
        listed = await session.stub.ListAdapters(ListAdaptersRequest())
        assert list(listed.adapters) == [added]


async def test_unknown_content_is_rejected_so_that_another_worker_may_serve_it(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, lora_name="a", lora_fingerprint="0" * 32)
        assert (await session.read_until("rejected")).reason == RejectReason.REJECT_REASON_ADAPTER
        await session.submit(2, lora_name="a", lora_fingerprint="a/../b")
        assert (await session.read_until("rejected")).reason == RejectReason.REJECT_REASON_INVALID


async def test_a_name_stands_for_the_new_content_once_it_is_added_again(
    worker: WorkerServer, folder: Path
) -> None:
    async with Session(worker.address) as session:
        add = AddAdapterRequest(name="a", path="first")
        before = (await session.stub.AddAdapter(add)).adapter.fingerprint
        assert (await session.stub.AddAdapter(add)).adapter.fingerprint == before
        shutil.rmtree(folder / "first")
        shutil.copytree(folder / "second", folder / "first")
        after = (await session.stub.AddAdapter(add)).adapter.fingerprint
        assert after != before
        same = (await session.stub.AddAdapter(AddAdapterRequest(name="b", path="second"))).adapter
        assert same.fingerprint == after, "the fingerprint is of the content, not of name or folder"
        await session.submit(1, lora_fingerprint=before)
        assert (await session.read_until("rejected")).reason == RejectReason.REJECT_REASON_ADAPTER
        await session.stub.RemoveAdapter(RemoveAdapterRequest(name="a"))
        await session.submit(2, lora_fingerprint=after)  # still named b
        await session.tokens_of(2)
        await session.stub.RemoveAdapter(RemoveAdapterRequest(name="b"))
        await session.submit(3, lora_fingerprint=after)
        assert (await session.read_until("rejected")).reason == RejectReason.REJECT_REASON_ADAPTER


async def test_bad_calls_name_their_fault(worker: WorkerServer, folder: Path) -> None:
    outside = folder.parent / "outside"
    shutil.copytree(folder / "first", outside)
    os.symlink(outside, folder / "link")
    async with Session(worker.address) as session:
        for path in ("../outside", str(folder / "first"), "link", "", ".", "first\0"):
            call = session.stub.AddAdapter(AddAdapterRequest(name="a", path=path))
            assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT, path
        for name in ("", "a/b"):
            call = session.stub.AddAdapter(AddAdapterRequest(name=name, path="first"))
            assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
        call = session.stub.AddAdapter(AddAdapterRequest(name="a", path="third"))
        assert await code_of(call) is grpc.StatusCode.NOT_FOUND
        call = session.stub.RemoveAdapter(RemoveAdapterRequest(name="a"))
        assert await code_of(call) is grpc.StatusCode.NOT_FOUND


async def test_a_refusal_that_quotes_a_long_name_arrives(worker: WorkerServer, folder: Path) -> None:
    save_file({"x" * 60_000: torch.zeros(1)}, folder / "first" / "adapter_model.safetensors")
    async with Session(worker.address) as session:
        call = session.stub.AddAdapter(AddAdapterRequest(name="a", path="first"))
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_without_slots_serves_no_adapters() -> None:
    worker = await started()
    try:
        async with Session(worker.address) as session:
            call = session.stub.AddAdapter(AddAdapterRequest(name="a", path="first"))
            assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
            await session.submit(1, lora_fingerprint="0" * 32)
            assert (await session.read_until("rejected")).reason == RejectReason.REJECT_REASON_ADAPTER
    finally:
        await worker.stop(0)
