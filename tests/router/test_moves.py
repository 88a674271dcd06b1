"""Real workers that preempt by moving: the next worker fetches the blocks, and no token changes."""

import asyncio
from typing import Any

import pytest
from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.router.cluster import link

from .rig import until
from .test_handover import BLOCK_BYTES, Cluster, ask, cluster, known_links, outputs, undisturbed

__all__ = ["known_links"]
NUM_BLOCKS = 48
SMALL = {
    "kv_cache_memory": NUM_BLOCKS * BLOCK_BYTES,
    "max_model_len": 512,
    "lend_share": 0.9,
    "swap_space_gib": 0.0,
}
"""A pool that holds one long request and a half."""
MAX_TOKENS = 350


@pytest.fixture(autouse=True)
def pinged_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers hear soon of room elsewhere, since their requests last a second here."""
    monkeypatch.setattr(link, "PING_SECONDS", 0.02)


async def crowded(here: Cluster, asked: list[dict[str, Any]]) -> list[Any]:
    """Let worker-0 begin more than it has room for, while worker-1 stands idle, and return the answers."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ask(here.client, **changes)) for changes in asked]
        await here.until_generating(len(asked), 5)
        await here.client.resume_worker("worker-1")
    return [task.result() for task in running]


async def num_moves(here: Cluster) -> list[int]:
    loads = {one.worker_id: one.load for one in await here.client.list_workers()}
    return [loads[name].moves for name in sorted(loads)]


async def has_moved(here: Cluster) -> bool:
    return sum(await num_moves(here)) > 0


async def test_a_preempted_sequence_moves_with_its_blocks() -> None:
    asked = [{"seed": seed, "max_tokens": MAX_TOKENS} for seed in range(3)]
    async with cluster(**SMALL) as here:
        expected = await undisturbed(here, asked)
        assert await num_moves(here) == [0, 0], "nothing moves while no other worker has room"
        answers = await crowded(here, asked)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert {answer.finish.migrations for answer in answers} == {0}, "no worker was lost"
        await until(lambda: has_moved(here), 10.0)
        assert {answer.finish.worker_id for answer in answers} == {"worker-0", "worker-1"}
        reports = here.starts[1].reports
        assert reports
        assert {report.end for report in reports} == {PullEnd.PULL_END_WHOLE}
        assert here.starts[1].num_recomputed == 0


async def test_a_sequence_moves_whatever_it_asked_for() -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 1.0, "regex": "[a-z]{2000}", "ignore_eos": False},
        {"temperature": 1.0, "n": 2, "max_tokens": 200},
    ]
    async with cluster(**SMALL) as here:
        for first in asked:
            # The one before it in rank keeps its place: what is asked for later moves.
            both = [{"seed": 9, "max_tokens": MAX_TOKENS}, {"seed": 1, "max_tokens": MAX_TOKENS} | first]
            before = sum(await num_moves(here))
            expected = await undisturbed(here, both)
            answers = await crowded(here, both)
            assert [outputs(answer) for answer in answers] == [outputs(answer) for answer in expected]
            await until(lambda: is_more(here, before), 10.0)  # noqa: B023


async def is_more(here: Cluster, before: int) -> bool:
    return sum(await num_moves(here)) > before
