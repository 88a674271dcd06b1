"""Inspection over a worker's session: its pool, its blocks and its sequences, page by page."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.v1 import cluster_pb2

from .serving import PATIENCE_SECONDS, ROOT, Session, assert_refused, engine_settings, serving


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    """Yield a session whose worker runs one request, of three outputs."""
    engine = engine_settings(simulated_step_seconds=0.005, max_num_seqs=4)
    async with serving(engine) as worker, Session(worker.address) as session:
        await session.submit(1, length=40, max_tokens=300, sampling={"n": 3})
        await session.until_runs()
        yield session


async def test_the_pool_is_seen_whole_and_block_by_block(session: Session) -> None:
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
    assert all(list(block.request_ids) == ["request-1"] for block in held), "once for all its outputs"
    assert max(block.references for block in held) >= 3
    assert held[0].name == chain(ROOT, [5] * 16, 16)[0]


async def test_a_block_is_found_by_number_and_by_name_with_its_parent_and_age(session: Session) -> None:
    first, second = chain(ROOT, [5] * 32, 16)
    asked = cluster_pb2.FindBlocksRequest(names=[second, first, b"?" * 16], block_ids=[63, 64])
    far, child, root = (await session.stub.FindBlocks(asked)).blocks
    assert (far.block_id, far.name, far.HasField("age_seconds")) == (63, b"", False)
    assert (child.name, child.parent, root.name, root.parent) == (second, first, first, b"")
    assert 0.0 <= child.age_seconds < PATIENCE_SECONDS
    await asyncio.sleep(0.01)
    again = cluster_pb2.FindBlocksRequest(block_ids=[child.block_id] * 3, names=[second])
    found = (await session.stub.FindBlocks(again)).blocks
    assert [block.block_id for block in found] == [child.block_id]
    assert found[0].age_seconds > child.age_seconds


async def test_sequences_are_listed_page_by_page_and_one_with_its_block_table(session: Session) -> None:
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
    held = (await session.stub.FindBlocks(cluster_pb2.FindBlocksRequest(block_ids=shown.block_table))).blocks
    assert [block.block_id for block in held] == list(shown.block_table)
    assert all(list(block.request_ids) == ["request-1"] for block in held[:2])
    gone = cluster_pb2.ListSequencesRequest(sequence_id=10**15)
    assert not (await session.stub.ListSequences(gone)).sequences


async def test_a_bad_page_is_an_invalid_argument_and_a_page_token_is_good_for_its_own_list_only(
    session: Session,
) -> None:
    page = await session.stub.ListBlocks(cluster_pb2.ListBlocksRequest(page_size=2))
    of_blocks = {"page_token": page.next_page_token}
    bad: tuple[dict[str, Any], ...] = ({"page_size": 1001}, {"page_token": "forged"}, {"page_token": "YTow"})
    for method, pages in (("ListBlocks", bad), ("ListSequences", (*bad, of_blocks))):
        for asked in pages:
            request = getattr(cluster_pb2, f"{method}Request")(**asked)
            await assert_refused(getattr(session.stub, method)(request), grpc.StatusCode.INVALID_ARGUMENT)
