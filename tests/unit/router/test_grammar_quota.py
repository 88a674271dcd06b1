"""One client's requests with grammars leave room on the workers for all other requests."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.router.generation.grammar_quota import PERMITS_OF_A_WORKER, GrammarQuota

from .fake_worker import FakeWorker, Script
from .rig import is_idle, request, running_router, until, worker_of_model


async def test_a_permit_is_free_again_with_the_first_token_at_the_end_or_when_a_waiting_task_is_cancelled():
    quota = GrammarQuota(lambda: 1)
    async with AsyncExitStack() as held, asyncio.TaskGroup() as tasks:
        leaves = [await held.enter_async_context(quota.permit("a")) for _ in range(PERMITS_OF_A_WORKER)]
        entered: list[str] = []

        async def enter(name: str) -> None:
            async with quota.permit("a"):
                entered.append(name)

        cancelled, waiting = tasks.create_task(enter("cancelled")), tasks.create_task(enter("waiting"))
        await asyncio.sleep(0)
        async with quota.permit("b"), quota.permit(None):
            pass
        cancelled.cancel()
        await asyncio.sleep(0)
        assert entered == []
        assert len(quota._clients["a"].waiting) == 1, "the cancelled one is forgotten"
        leaves[0]()
        leaves[0]()
        await waiting
    assert entered == ["waiting"]
    assert len(quota) == 0


def _worker(name: str) -> FakeWorker:
    """Return a worker on which no request with a grammar gets its first token."""
    return worker_of_model(
        name, script=lambda submit: Script(step_seconds=0.001 if submit.request_id == "plain" else 60.0)
    )


async def test_more_workers_give_more_permits_to_waiting_requests() -> None:
    ready: list[str] = []
    quota = GrammarQuota(lambda: len(ready))
    leaves: list[Callable[[], None]] = []
    async with asyncio.TaskGroup() as tasks:
        over = asyncio.Event()

        async def enter() -> None:
            async with quota.permit("a") as leave:
                leaves.append(leave)
                await over.wait()

        for _ in range(5 * PERMITS_OF_A_WORKER):
            tasks.create_task(enter())
        for workers, expected in ("", 1), ("a", 1), ("abc", 3), ("ab", 3):
            ready[:] = workers
            quota.hand_out()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(leaves) == expected * PERMITS_OF_A_WORKER
        for leave in leaves[: PERMITS_OF_A_WORKER + 1]:
            leave()
        await asyncio.sleep(0)
        assert len(leaves) == 3 * PERMITS_OF_A_WORKER + 1, (
            "a permit is given when fewer are taken than there are"
        )
        over.set()
    assert len(leaves) == 5 * PERMITS_OF_A_WORKER
    assert len(quota) == 0


async def test_each_worker_adds_to_what_one_client_may_have_on_them() -> None:
    first, second = _worker("a"), _worker("b")
    async with running_router() as router, router.workers(first):
        slow = {"structured_output": StructuredOutput(regex="a+")}
        flood = [
            router.inference.GenerateStream(request(sampling=slow)) for _ in range(3 * PERMITS_OF_A_WORKER)
        ]
        await until(lambda: first.num_running == PERMITS_OF_A_WORKER, seconds=30)
        await asyncio.sleep(0.5)  # by then the others wait, and none of them comes later
        async with second:
            router.server.set_workers([first.address, second.address])
            await until(lambda: first.num_running + second.num_running == 2 * PERMITS_OF_A_WORKER, seconds=30)
            answer = await router.inference.Generate(request(request_id="plain"), timeout=30)
            assert len(answer.outputs[0].token_ids) == 20
            assert first.num_running + second.num_running == 2 * PERMITS_OF_A_WORKER
            assert {submit.client for submit in first.submits} != {0}
            for call in flood:
                call.cancel()
            await until(lambda: is_idle(router), seconds=30)
