"""Real workers that preempt by moving: the next worker fetches the blocks, and no token changes."""

import asyncio
from typing import Any

import pytest
from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.router.cluster import link
from blockyard.router.generation import relay
from blockyard.worker.cache.block_tables import Loan
from blockyard.worker.server import WorkerServer

from tests.unit.router.rig import until

from .rig import BLOCK_BYTES, EVERYTHING, WISHES, Cluster, ask, cluster, known_links, outputs, undisturbed

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


async def test_a_preempted_sequence_moves_with_its_blocks() -> None:
    asked = [{"seed": seed, "max_tokens": MAX_TOKENS} for seed in range(3)]
    async with cluster(**SMALL) as here:
        expected = await undisturbed(here, asked)
        assert await num_moves(here) == [0, 0], "nothing moves while no other worker has room"
        answers = await crowded(here, asked)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert {answer.finish.migrations for answer in answers} == {0}, "no worker was lost"
        await until(lambda: is_more(here, 0))
        assert {answer.finish.worker_id for answer in answers} == {"worker-0", "worker-1"}
        reports = here.starts[1].reports
        assert reports
        assert {report.end for report in reports} == {PullEnd.PULL_END_WHOLE}
        assert here.starts[1].num_recomputed == 0


async def test_a_sequence_moves_whatever_it_asked_for() -> None:
    async with cluster(**SMALL) as here:
        for first in (*WISHES[2:5], {"temperature": 1.0, "n": 2, "max_tokens": 200, **EVERYTHING}):
            # The one before it in rank keeps its place: what is asked for later moves.
            both = [{"seed": 9, "max_tokens": MAX_TOKENS}, {"seed": 1, "max_tokens": MAX_TOKENS} | first]
            before = sum(await num_moves(here))
            expected = await undisturbed(here, both)
            answers = await crowded(here, both)
            assert [outputs(answer) for answer in answers] == [outputs(answer) for answer in expected]
            await until(lambda: is_more(here, before))  # noqa: B023


async def test_a_beam_search_stays_where_it_is() -> None:
    asked = [
        {"seed": 9, "max_tokens": MAX_TOKENS},
        {"seed": 1, "max_tokens": 120, "beam_width": 3, "n": 2},
        {"seed": 2, "max_tokens": 120, "beam_width": 3, "n": 2},
    ]
    async with cluster(**SMALL) as here:
        expected = await undisturbed(here, asked)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(ask(here.client, **changes)) for changes in asked]
            await here.until_generating(1, 5)
            await here.client.resume_worker("worker-1")
        assert [outputs(task.result()) for task in running] == [outputs(answer) for answer in expected]
        assert {task.result().finish.worker_id for task in running[1:]} == {"worker-0"}


async def is_more(here: Cluster, before: int) -> bool:
    return sum(await num_moves(here)) > before


def die(worker: WorkerServer) -> "asyncio.Future[None]":
    """End all connections of a worker at once, as its death does."""
    worker._exchange._lender.stop()
    return asyncio.ensure_future(worker._server.stop(0))


@pytest.mark.fault(80)
async def test_a_source_that_dies_before_its_blocks_are_fetched_costs_only_the_computing(
    monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any]
) -> None:
    asked = [{"seed": seed, "max_tokens": MAX_TOKENS} for seed in range(3)]
    async with cluster(**SMALL) as here:
        expected = await undisturbed(here, asked)
        source, loop, deaths = here.workers[0], asyncio.get_running_loop(), []
        send = source._exchange._lender._send_blocks

        def send_one(connection: Any, loan: Loan, *others: Any) -> None:
            loan.num_unsent = min(loan.num_unsent, 1)
            send(connection, loan, *others)
            loop.call_soon_threadsafe(lambda: deaths.append(die(source)))

        monkeypatch.setattr(source._exchange._lender, "_send_blocks", send_one)
        answers = await crowded(here, asked)
        assert deaths, "something has moved"
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        lost = [answer.finish.migrations for answer in answers]
        assert 0 in lost, "to move is no loss"
        measured.update(failed=0, migrated=sum(lost))
        await asyncio.gather(*deaths)


@pytest.mark.fault(81)
async def test_a_destination_that_dies_loses_no_token_of_what_moved_there(measured: dict[str, Any]) -> None:
    asked = [{"seed": seed, "max_tokens": MAX_TOKENS} for seed in range(3)]
    async with cluster(**SMALL) as here:
        expected = await undisturbed(here, asked)

        async def death() -> None:
            await until(lambda: here.starts[1].computed, 60.0)
            await die(here.workers[1])

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(death())
            answers = await crowded(here, asked)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert {answer.finish.worker_id for answer in answers} == {"worker-0"}
        lost = [answer.finish.migrations for answer in answers]
        assert sum(lost) > 0, "a death counts"
        measured.update(failed=0, migrated=sum(lost))


@pytest.mark.fault(82)
async def test_between_full_workers_nothing_wanders_and_all_end(measured: dict[str, Any]) -> None:
    asked = [{"seed": seed, "max_tokens": MAX_TOKENS} for seed in range(8)]
    async with cluster(**SMALL) as here:
        expected = await undisturbed(here, asked)
        await here.client.resume_worker("worker-1")
        answers = await asyncio.gather(*(ask(here.client, **changes) for changes in asked))
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert {answer.finish.migrations for answer in answers} == {0}
        moves = sum(await num_moves(here))
        assert moves <= relay.MAX_PREEMPTIONS * len(asked)
        measured.update(failed=0, note=f"{moves} moves of {len(asked)} requests")
