"""Inspection over a worker's session: its pool, its blocks and its sequences, page by page."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.v1 import cluster_pb2
from blockyard.worker.server import WorkerServer

from .test_session import PATIENCE_SECONDS, ROOT, Session
from .test_session import worker as worker


async def test_the_pool_is_seen_whole_and_block_by_block(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, length=40, max_tokens=300)
        await session.until_runs()
        pool = await session.stub.GetBlockPool(cluster_pb2.GetBlockPoolRequest())
        assert pool.free_blocks + pool.cached_blocks + pool.used_blocks == pool.total_blocks == 64
        assert sum(run.length for run in pool.runs) == 64
        first = await session.stub.ListBlocks(cluster_pb2.ListBlocksRequest(page_size=40))
        rest = await session.stub.ListBlocks(
            cluster_pb2.ListBlocksRequest(page_size=40, page_token=first.next_page_token)
        )
        blocks = [*first.blocks, *rest.blocks]
        assert [block.block_id for block in blocks] == list(range(64))
        assert rest.next_page_token == ""
        held = [block for block in blocks if block.request_ids]
        assert held
        assert all(list(block.request_ids) == ["request-1"] for block in held)
        assert held[0].name == chain(ROOT, [5] * 16, 16)[0]


async def test_a_block_that_many_outputs_hold_names_their_request_once(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, length=40, max_tokens=300, sampling={"n": 3})
        await session.until_runs()
        listed = await session.stub.ListBlocks(cluster_pb2.ListBlocksRequest())
        held = [block for block in listed.blocks if block.request_ids]
        assert all(list(block.request_ids) == ["request-1"] for block in held)
        assert max(block.references for block in held) >= 3


async def test_a_block_is_found_by_number_and_by_name_with_its_parent_and_age(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, length=40, max_tokens=300)
        await session.until_runs()
        first, second = chain(ROOT, [5] * 32, 16)
        asked = cluster_pb2.FindBlocksRequest(names=[second, first, b"?" * 16], block_ids=[63, 64])
        far, child, root = (await session.stub.FindBlocks(asked)).blocks
        assert (far.block_id, far.name, far.HasField("age_seconds")) == (63, b"", False)
        assert (child.name, child.parent, root.name, root.parent) == (second, first, first, b"")
        assert 0.0 <= child.age_seconds < PATIENCE_SECONDS
        again = cluster_pb2.FindBlocksRequest(block_ids=[child.block_id] * 3, names=[second])
        found = (await session.stub.FindBlocks(again)).blocks
        assert [block.block_id for block in found] == [child.block_id]
        await asyncio.sleep(0.05)
        assert found[0].age_seconds > child.age_seconds


async def test_sequences_are_listed_page_by_page_and_one_with_its_block_table(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        await session.submit(1, length=40, max_tokens=300, sampling={"n": 3})
        await session.until_runs()
        pages, token = [], ""
        while not pages or token:
            asked = cluster_pb2.ListSequencesRequest(page_size=2, page_token=token)
            page = await session.stub.ListSequences(asked)
            pages.append(page.sequences)
            token = page.next_page_token
        assert [len(page) for page in pages] == [2, 1]
        listed = [sequence for page in pages for sequence in page]
        assert {(each.request_id, each.index, each.prompt_tokens) for each in listed} == {
            ("request-1", index, 40) for index in range(3)
        }
        assert all(not each.block_table for each in listed)
        one = cluster_pb2.ListSequencesRequest(sequence_id=listed[1].sequence_id)
        (shown,) = (await session.stub.ListSequences(one)).sequences
        assert len(shown.block_table) == shown.num_blocks >= 3
        asked = cluster_pb2.FindBlocksRequest(block_ids=shown.block_table)
        held = (await session.stub.FindBlocks(asked)).blocks
        assert [block.block_id for block in held] == list(shown.block_table)
        assert all(list(block.request_ids) == ["request-1"] for block in held[:2])
        gone = cluster_pb2.ListSequencesRequest(sequence_id=10**15)
        assert not (await session.stub.ListSequences(gone)).sequences


@pytest.mark.parametrize("request_", [{"page_size": 1001}, {"page_token": "forged"}, {"page_token": "YTow"}])
@pytest.mark.parametrize("method", ["ListBlocks", "ListSequences"])
async def test_a_bad_page_is_an_invalid_argument(
    worker: WorkerServer, method: str, request_: dict[str, Any]
) -> None:
    async with Session(worker.address) as session:
        kind = getattr(cluster_pb2, f"{method}Request")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(session.stub, method)(kind(**request_))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_page_token_is_good_for_its_own_list_only(worker: WorkerServer) -> None:
    async with Session(worker.address) as session:
        page = await session.stub.ListBlocks(cluster_pb2.ListBlocksRequest(page_size=2))
        other = cluster_pb2.ListSequencesRequest(page_token=page.next_page_token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.stub.ListSequences(other)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
