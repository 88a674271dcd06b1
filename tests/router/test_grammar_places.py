"""One client's requests with grammars leave room on the workers for everybody else's."""

import asyncio
from contextlib import AsyncExitStack

from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.router.grammar_places import PLACES_A_CLIENT, GrammarPlaces

from .fake_worker import Script
from .rig import is_idle, request, running_router, until, worker_of_model


async def test_a_place_is_free_again_with_the_first_token_at_the_end_or_when_who_waits_is_cancelled() -> None:
    places = GrammarPlaces()
    async with AsyncExitStack() as held, asyncio.TaskGroup() as tasks:
        leaves = [await held.enter_async_context(places.place("a")) for _ in range(PLACES_A_CLIENT)]
        entered: list[str] = []

        async def enter(name: str) -> None:
            async with places.place("a"):
                entered.append(name)

        cancelled, waiting = tasks.create_task(enter("cancelled")), tasks.create_task(enter("waiting"))
        await asyncio.sleep(0)
        async with places.place("b"), places.place(None):
            pass
        cancelled.cancel()
        await asyncio.sleep(0)
        assert entered == []
        leaves[0]()
        leaves[0]()
        await waiting
    assert entered == ["waiting"]
    assert len(places) == 0


async def test_one_clients_slow_grammars_leave_room_on_a_worker_for_others() -> None:
    worker = worker_of_model(
        "a", script=lambda submit: Script(step_seconds=0.001 if submit.request_id == "plain" else 60.0)
    )
    async with running_router() as router, router.workers(worker):
        slow = {"structured_output": StructuredOutput(regex="a+")}
        flood = [router.inference.GenerateStream(request(sampling=slow)) for _ in range(64)]
        await until(lambda: worker.num_running == PLACES_A_CLIENT, seconds=30)
        answer = await router.inference.Generate(request(request_id="plain"), timeout=30)
        assert len(answer.outputs[0].token_ids) == 20
        assert worker.num_running == PLACES_A_CLIENT
        assert {submit.client for submit in worker.submits} != {0}
        for call in flood:
            call.cancel()
        await until(lambda: is_idle(router), seconds=30)
