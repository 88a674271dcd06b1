"""A burst before any report: a worker gets no more requests than it said it would queue."""

import asyncio

from blockyard.router.generation.attempt import Progress

from .fake_worker import FakeWorker, Script
from .relay_rig import generation, rig

BURST = 24


async def bounces_of_a_burst(told_waiting: int) -> int:
    """At a worker that runs two and queues three."""
    worker = FakeWorker("w0", script=lambda submit: Script(step_seconds=0.005), max_waiting=told_waiting)
    worker.max_running, worker.max_waiting = 2, 3
    async with rig(worker) as made:

        async def run(seed: int) -> None:
            await made.relay.run(generation(seed, max_tokens=2), Progress(), lambda chunk: False)

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for seed in range(BURST):
                tasks.create_task(run(seed))
        await made.until_quiet()
    assert sorted(worker.started) == sorted(f"request-{seed}" for seed in range(BURST))
    return len(worker.submits) - BURST


async def test_a_burst_hardly_bounces_off_a_worker_that_says_what_it_queues() -> None:
    """A few may bounce: a report sent before they arrived says that no request waits."""
    assert await bounces_of_a_burst(told_waiting=0) > BURST / 2
    assert await bounces_of_a_burst(told_waiting=3) < BURST / 2
