"""Real workers that hand running requests over: the next worker fetches their blocks, and no token changes.

The workers compute the demo model on CPU, in deterministic mode.
"""

import asyncio
from typing import Any

import pytest
from blockyard.router.cluster.sources import PullLinks
from blockyard.router.placement.pulls import UNKNOWN_LINK

from tests.unit.router.rig import until

from .rig import (
    BLOCK_TOKENS,
    EVERYTHING,
    WISHES,
    Cluster,
    ask,
    cluster,
    has_come_whole,
    known_links,
    outputs,
    undisturbed,
)

__all__ = ["known_links"]


async def moved(here: Cluster, asked: list[dict[str, Any]], num_tokens: int = 20) -> list[Any]:
    """Let worker-0 begin these requests, hand them over to worker-1, and return the answers."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ask(here.client, **changes)) for changes in asked]
        await here.until_generating(len(asked), num_tokens)
        await here.client.resume_worker("worker-1")
        assert await here.drain(0) == len(asked)
    assert {task.result().finish.migrations for task in running} == {0}, "a drain counts as no death"
    return [task.result() for task in running]


async def test_a_drain_moves_running_sequences_with_their_blocks_whatever_they_ask_for() -> None:
    asked = [{"seed": seed, **changes} for seed, changes in enumerate(WISHES)]
    async with cluster() as here:
        expected = await undisturbed(here, asked)
        answers = await moved(here, asked)
        assert [outputs(answer) for answer in answers] == [outputs(answer) for answer in expected]
        assert has_come_whole(here, len(asked))
        assert {answer.finish.cached_tokens for answer in answers} == {0}, "as the first worker found"


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["plain", "everything"])
async def test_several_outputs_move_with_the_blocks_of_each(changes: dict[str, Any]) -> None:
    asked = [{"seed": 3, "n": 3, **changes}]
    async with cluster() as here:
        (expected,) = await undisturbed(here, asked)
        (answer,) = await moved(here, asked, num_tokens=90)
        assert outputs(answer) == outputs(expected)
        assert len(here.starts[1].computed) == 3
        assert has_come_whole(here, 3)


async def test_beams_begin_again() -> None:
    asked = [{"seed": 3, "beam_width": 3, "n": 2, "max_tokens": 80}]
    async with cluster() as here:
        (expected,) = await undisturbed(here, asked)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(ask(here.client, **asked[0]))
            await until(lambda: here.starts[0].computed[1:], 60.0)
            await here.client.resume_worker("worker-1")
            assert await here.drain(0) == 1
        assert outputs(running.result()) == outputs(expected)


async def test_nothing_is_fetched_over_a_link_that_nobody_has_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PullLinks, "link", lambda links, worker: UNKNOWN_LINK)
    asked = [{"seed": 3}]
    async with cluster() as here:
        (expected,) = await undisturbed(here, asked)
        (answer,) = await moved(here, asked)
        assert answer.token_ids == expected.token_ids
        assert here.starts[1].reports == []
        ((known, computed),) = here.starts[1].computed
        assert computed == known


async def test_a_worker_that_ends_waits_until_its_sequences_have_moved() -> None:
    asked = [{"seed": seed} for seed in range(4)]
    async with cluster() as here:
        expected = await undisturbed(here, asked)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(ask(here.client, **changes)) for changes in asked]
            await here.until_generating(4, 20)
            await here.client.resume_worker("worker-1")
            tasks.create_task(here.stop(0))
        assert [task.result().token_ids for task in running] == [answer.token_ids for answer in expected]
        assert {task.result().finish.migrations for task in running} == {0}
        assert has_come_whole(here, 4)


async def test_a_source_that_lends_no_more_costs_only_the_computing() -> None:
    asked = [{"seed": seed} for seed in range(4)]
    async with cluster() as here:
        expected = await undisturbed(here, asked)
        here.workers[0]._exchange._lender.stop()
        answers = await moved(here, asked)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert {report.num_blocks for report in here.starts[1].reports} == {0}


async def test_a_sequence_that_comes_back_finds_the_blocks_that_it_left() -> None:
    asked = {"seed": 3, "max_tokens": 300}
    async with cluster() as here:
        (expected,) = await undisturbed(here, [asked])
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(ask(here.client, **asked))
            for here_now, next_one, num_tokens in ((0, 1, 20), (1, 0, 60)):
                await here.until_generating(1, num_tokens)
                await here.client.resume_worker(f"worker-{next_one}")
                assert await here.drain(here_now) == 1
        assert running.result().token_ids == expected.token_ids
        first, second = (starts.computed[-1] for starts in here.starts)
        assert first[1] == (first[0] - 1) % BLOCK_TOKENS + 1
        assert second[1] == (second[0] - 1) % BLOCK_TOKENS + 1
        (report,) = here.starts[0].reports
        left_with = second[0] - 1
        assert report.num_blocks == (first[0] - 1) // BLOCK_TOKENS - left_with // BLOCK_TOKENS
