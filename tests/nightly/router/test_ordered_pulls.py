"""Pulls that an admin orders, on real workers: the blocks, the tokens and the words of each refusal."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.router.client.errors import (
    BlockyardError,
    InvalidRequestError,
    NotFoundError,
    TimedOutError,
    UnavailableError,
)
from blockyard.worker.engine import Engine
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.server import WorkerServer
from blockyard.worker.transfer.rules import Avoided

from tests.unit.router.rig import until

from .rig import Cluster, ask, cluster, prompt

LENGTH = 200
BLOCKS = 12
PROMPT = prompt(5, LENGTH)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(server: RedisProcess) -> AsyncIterator[Cluster]:
    async with cluster(redis_url=server.url, lend_share=0.5) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def source(here: Cluster) -> str:
    """Worker-0 has the prompt, and no other."""
    await here.client.flush_cache()
    await here.drain(1)
    await ask(here.client, 1, prompt_token_ids=PROMPT)
    await here.client.resume_worker("worker-1")
    await until(lambda: is_known(here, "worker-0"), 30.0)
    return "worker-0"


async def holders(here: Cluster, token_ids: list[int] = PROMPT) -> dict[str, int]:
    found = await here.client.lookup_prefix(prompt_token_ids=token_ids)
    return {holder.worker_id: holder.cached_blocks + holder.host_cached_blocks for holder in found.holders}


async def is_known(here: Cluster, worker_id: str) -> bool:
    return (await holders(here)).get(worker_id) == BLOCKS


async def bytes_of(here: Cluster, worker: WorkerServer) -> list[bytes]:
    names = (await here.client.lookup_prefix(prompt_token_ids=PROMPT)).block_names
    memory = worker._loaded.runner.transferable

    def read(engine: Engine) -> list[bytes]:
        loan = engine.scheduler.tables.lend([BlockName(name) for name in names])
        found = [b"".join(memory.block(block)) for block in loan.blocks]
        found += [bytes(memory.slot(slot)) for slot in loan.host_slots]
        engine.scheduler.tables.end_loan(loan)
        return found

    return await asyncio.wrap_future(worker._engine.call(read))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("named", [True, False])
async def test_an_ordered_pull_brings_the_blocks_publishes_them_and_is_shown_like_any_other(
    here: Cluster, source: str, named: bool
) -> None:
    await here.drain(1)
    expected = await ask(here.client, 1, prompt_token_ids=PROMPT, session_id="a")
    await here.client.resume_worker("worker-1")
    num_before = num_whole(here)
    wanted = source if named else None
    pulled = await here.client.pull_prefix("worker-1", prompt_token_ids=PROMPT, source_id=wanted)
    assert (pulled.source_id, pulled.prompt_blocks, pulled.blocks_before) == (source, BLOCKS, 0)
    assert (pulled.num_blocks, pulled.num_bytes > 0, pulled.elapsed_ms > 0) == (BLOCKS, True, True)
    (shown, *_) = (await here.client.cluster_info()).pulls
    assert (shown.worker_id, shown.source_id, shown.end) == ("worker-1", source, "whole")
    assert shown.num_blocks == BLOCKS
    await until(lambda: num_whole(here) == num_before + 1, 30.0)
    await until(lambda: has_pulled(here), 30.0)
    await until(lambda: is_known(here, "worker-1"), 30.0)
    first, second = [await bytes_of(here, worker) for worker in here.workers]
    assert len(second) == BLOCKS
    assert second == first, "equal to the bit"
    again = await here.client.pull_prefix("worker-1", prompt_token_ids=PROMPT, source_id=source)
    assert (again.blocks_before, again.num_blocks) == (BLOCKS, 0)
    await here.drain(0)
    answer = await ask(here.client, 1, prompt_token_ids=PROMPT)
    await here.client.resume_worker("worker-0")
    assert answer.finish.worker_id == "worker-1"
    assert answer.finish.cached_tokens == BLOCKS * 16
    assert answer.token_ids == expected.token_ids


def num_whole(here: Cluster) -> float:
    ends: Any = here.router.server.readings["router_pulls"]
    return ends.get("whole", 0)


async def has_pulled(here: Cluster) -> bool:
    return any(
        one.worker_id == "worker-1" and one.load.pulled_blocks >= BLOCKS
        for one in await here.client.list_workers()
    )


async def test_a_source_that_has_a_part_sends_that(here: Cluster, source: str) -> None:
    longer = [*PROMPT, *prompt(9, 100)]
    pulled = await here.client.pull_prefix("worker-1", prompt_token_ids=longer, source_id=source)
    assert (pulled.prompt_blocks, pulled.num_blocks) == (18, BLOCKS)


async def failure(call: Any) -> tuple[type[BlockyardError], str]:
    try:
        await call
    except BlockyardError as error:
        return type(error), error.reason
    raise AssertionError("it was answered")


UNKNOWN = prompt(77, 90)
NOT_FOUND, INVALID = (NotFoundError, "WORKER_NOT_FOUND"), (InvalidRequestError, "INVALID_REQUEST")
IMPOSSIBLE = (InvalidRequestError, "PULL_IMPOSSIBLE")


async def test_what_cannot_be_pulled_is_refused_in_words(here: Cluster, source: str) -> None:
    for changes, expected in (
        ({"worker_id": "worker-9"}, NOT_FOUND),
        ({"source_id": "worker-9"}, NOT_FOUND),
        ({"source_id": "worker-1"}, INVALID),
        ({"prompt_token_ids": [5, 6, 7]}, IMPOSSIBLE),
        ({"prompt_token_ids": UNKNOWN}, IMPOSSIBLE),
        ({"prompt_token_ids": UNKNOWN, "source_id": "worker-0"}, IMPOSSIBLE),
    ):
        wanted: dict[str, Any] = {"worker_id": "worker-1", "prompt_token_ids": PROMPT} | changes
        assert await failure(here.client.pull_prefix(**wanted)) == expected


async def test_a_source_of_another_layout_is_refused_in_words(here, source, monkeypatch):
    monkeypatch.setattr(here.workers[1]._exchange._receiver, "_layout", "another")
    with pytest.raises(InvalidRequestError, match="another model, data type, size or layout"):
        await here.client.pull_prefix("worker-1", prompt_token_ids=PROMPT, source_id=source)
    monkeypatch.undo()
    here.workers[1]._exchange._receiver._avoided = Avoided()


async def test_a_pull_ends_with_the_calls_deadline(here, source, monkeypatch):
    lender = here.workers[0]._exchange._lender
    for _ in range(4):
        lender._loans.acquire()  # no turn is free
    try:
        call = here.client.pull_prefix(
            "worker-1", prompt_token_ids=PROMPT, source_id=source, timeout_seconds=1.0
        )
        async with asyncio.timeout(60):
            assert (await failure(call))[0] in (TimedOutError, UnavailableError)
    finally:
        for _ in range(4):
            lender._loans.release()


async def test_workers_that_cannot_lend_or_fetch_are_told_apart() -> None:
    async with cluster(host_cache_gib=0.0) as bare:
        with pytest.raises(InvalidRequestError, match="no host memory for blocks"):
            await bare.client.pull_prefix("worker-1", prompt_token_ids=PROMPT, source_id="worker-0")
        with pytest.raises(InvalidRequestError, match="there is no prefix index"):
            await bare.client.pull_prefix("worker-1", prompt_token_ids=PROMPT)
