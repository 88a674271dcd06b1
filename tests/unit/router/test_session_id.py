"""A session's name on its way from the client to placement and back, over real gRPC."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from blockyard.proto.index.contract import Batch, Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.naming.block_hash import split_names
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.router.generation.attempt import Progress
from blockyard.router.placement.config import PlacementConfig

from .fake_worker import BLOCK_SIZE, FakeWorker
from .prompt import Clock
from .relay_rig import generation, rig
from .rig import Router, fields_of, refused, request, running_router, worker_of_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = [f"def f{number}(x):" for number in range(12)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[Router]:
    """Without an index, before four workers that have measured nothing: a prompt token costs what the settings say."""
    workers = [worker_of_model(name) for name in "abcd"]
    placement = PlacementConfig(assumed_prefill_tokens_per_second=500)
    async with running_router(placement=placement) as running, running.workers(*workers):
        yield running


async def test_requests_of_a_session_meet_on_one_worker_and_others_spread(router: Router) -> None:
    async with AsyncClient(router.address) as client:

        async def homes(**session: Any) -> set[str]:
            answers = [await client.generate(prompt, max_tokens=2, **session) for prompt in PROMPTS]
            return {answer.finish.worker_id for answer in answers}

        assert len(await homes()) > 1
        home = await homes(session_id="chat:1")
        assert len(home) == 1
        explained = await client.explain_placement(PROMPTS[0], session_id="chat:1")
        assert {explained.chosen_worker_id} == home
        homes_of_many = set().union(*[await homes(session_id=f"chat:{number}") for number in range(8)])
        assert len(homes_of_many) > 1


async def test_an_explanation_shows_what_the_policy_compares_and_terms_that_add_up(router: Router) -> None:
    question = cluster_pb2.ExplainPlacementRequest(prompt="x" * 200, session_id="chat")
    explained = await router.cluster.ExplainPlacement(question)
    assert [worker.cost for worker in explained.candidates] == [0, 1, 6, 7], "two homes, then the rest"
    assert explained.candidates[0].worker_id == explained.chosen_worker_id
    for worker in explained.candidates:
        terms = (worker.queue_ms, worker.prefill_ms, worker.host_load_ms, worker.decode_ms)
        assert worker.prefill_ms == 2 * worker.uncached_tokens > 0
        assert sum(terms) + worker.memory_ms + worker.interference_ms == pytest.approx(worker.total_ms)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a\n", "é", "a" * 129])
async def test_a_session_is_named_like_a_request(router: Router, name: str) -> None:
    calls = (
        router.inference.GenerateStream(request(session_id=name)),
        router.inference.Generate(request(session_id=name)),
        router.cluster.ExplainPlacement(cluster_pb2.ExplainPlacementRequest(prompt="x", session_id=name)),
    )
    for call in calls:
        error = await refused(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_of(error) == ["session_id"]


async def test_what_a_worker_reused_is_held_against_what_the_index_promised() -> None:
    """The scripted worker always reuses two blocks."""
    async with rig(FakeWorker("w0")) as made:
        index = TwinPrefixIndex(Clock())
        record = WorkerRecord(
            worker_id=WorkerId("w0"),
            incarnation=Incarnation("w0-life-1"),
            address=made.workers[0].address,
            fingerprint="model",
            block_size=BLOCK_SIZE,
        )
        wanted = generation(1, prompt_tokens=100)
        names = split_names(wanted.block_names)[1:]
        berth = await index.register(record, lease_seconds=600.0)
        await index.apply(berth, Batch(sequence=1, added=tuple(names[:5])))
        made.placer.prefix_lookup = PrefixLookup(index)
        await made.relay.run(wanted, Progress(), lambda chunk: False)
        view = made.fleet.view
        assert (view.promised_blocks, view.stale_blocks) == (5, 3)
