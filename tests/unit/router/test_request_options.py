"""Sessions, policies and agents' hints on their way from a client to placement and the worker, over real gRPC."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from blockyard.proto.index.contract import Batch, Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.proto.naming.block_hash import split_names
from blockyard.proto.v1 import cluster_pb2, inference_pb2
from blockyard.router.admission.token_entries import new_token
from blockyard.router.client import AsyncClient
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.router.generation.attempt import Progress
from blockyard.router.placement.config import PlacementConfig

from .fake_worker import BLOCK_SIZE, FakeWorker
from .prompt import Clock
from .relay_rig import generation, rig
from .rig import Router, fields_of, reason_of, refused, request, running_router, worker_of_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = [f"def f{number}(x):" for number in range(12)]
Four = tuple[Router, list[FakeWorker], AsyncClient]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def four() -> AsyncIterator[Four]:
    """Without an index, before four workers that have measured nothing: a prompt token costs what the settings say."""
    workers = [worker_of_model(name) for name in "abcd"]
    placement = PlacementConfig(assumed_prefill_tokens_per_second=500)
    async with (
        running_router(placement=placement) as running,
        running.workers(*workers),
        AsyncClient(running.address) as client,
    ):
        yield running, workers, client


async def test_requests_of_a_session_meet_on_one_worker_and_others_spread_unless_a_policy_is_named(four):
    _, _, client = four

    async def homes(prompts: list[str] = PROMPTS, **options: Any) -> list[str]:
        answers = [await client.generate(prompt, max_tokens=2, **options) for prompt in prompts]
        return [answer.finish.worker_id for answer in answers]

    assert len(set(await homes())) > 1
    home = set(await homes(session_id="chat:1"))
    assert len(home) == 1
    explained = await client.explain_placement(PROMPTS[0], session_id="chat:1")
    assert {explained.chosen_worker_id} == home
    assert len(set().union(*[await homes(session_id=f"chat:{number}") for number in range(8)])) > 1
    assert sorted(await homes(PROMPTS[:4], session_id="chat:1", policy="round_robin")) == ["a", "b", "c", "d"]


async def test_an_explanation_shows_what_the_policy_compares_and_terms_that_add_up(four: Four) -> None:
    question = cluster_pb2.ExplainPlacementRequest(prompt="x" * 200, session_id="chat")
    explained = await four[0].cluster.ExplainPlacement(question)
    assert [worker.cost for worker in explained.candidates] == [0, 1, 6, 7], "two homes, then the rest"
    assert explained.candidates[0].worker_id == explained.chosen_worker_id
    for worker in explained.candidates:
        terms = (worker.queue_ms, worker.prefill_ms, worker.host_load_ms, worker.decode_ms)
        assert worker.prefill_ms == 2 * worker.uncached_tokens > 0
        assert sum(terms) + worker.memory_ms + worker.interference_ms == pytest.approx(worker.total_ms)


async def test_a_hint_reaches_the_worker_and_a_request_without_one_says_nothing(four: Four) -> None:
    _, workers, client = four
    for hint in ({"session_id": "s", "expected_pause_seconds": 12.5}, {}):
        for worker in workers:
            worker.submits.clear()
        await client.generate("x", max_tokens=1, **hint)
        (submit,) = (submit for worker in workers for submit in worker.submits)
        assert submit.expected_pause_seconds == hint.get("expected_pause_seconds", 0.0)


@pytest.mark.parametrize(("given", "priority"), [({}, 99), ({"priority": 0}, 0), ({"priority": -5}, -5)])
async def test_a_prefetch_asks_for_one_token_and_no_structure_last_of_all_and_answers_none(
    four: Four, given: dict[str, Any], priority: int
) -> None:
    _, workers, client = four
    for worker in workers:
        worker.submits.clear()
    wanted = {
        "max_tokens": 50,
        "stop": ["x"],
        "json_schema": {"type": "object"},
        "return_prompt_token_ids": True,
    }
    answer = await client.generate("def f(x):", prefetch=True, **wanted, **given)
    (submit,) = (submit for worker in workers for submit in worker.submits)
    assert (submit.sampling.max_tokens, submit.sampling.min_tokens, submit.priority) == (1, 0, priority)
    assert not submit.sampling.HasField("structured_output")
    assert (answer.text, list(answer.token_ids)) == ("", [])
    assert (answer.finish.reason, answer.finish.completion_tokens) == ("length", 0)
    assert answer.finish.prompt_tokens == len(answer.prompt_token_ids) == submit.prompt_tokens


PAUSES = [({"expected_pause_seconds": pause}, ["expected_pause_seconds"]) for pause in (0.0, -1.0, 3600.5)]
SESSIONS = [({"session_id": name}, ["session_id"]) for name in ("", "a b", "a/b", "a\n", "é", "a" * 129)]
REPORTS = ["sampling.n", "sampling.logprobs", "sampling.prompt_logprobs"]


@pytest.mark.parametrize(
    ("fields", "violations"),
    [
        *PAUSES,
        *SESSIONS,
        ({"expected_pause_seconds": float("nan")}, ["expected_pause_seconds"]),
        ({"expected_pause_seconds": float("inf")}, ["expected_pause_seconds"]),
        ({"prefetch": True, "sampling": {"n": 2, "logprobs": 0, "prompt_logprobs": 1}}, REPORTS),
        ({"prefetch": True, "sampling": {"beam_width": 2}}, ["sampling.beam_width"]),
        *(({"policy": name}, ["policy"]) for name in ("", "Prefix", "random")),
    ],
)
async def test_an_option_that_means_nothing_is_refused_by_its_field(four, fields, violations):
    router, _, _ = four
    calls = [router.inference.Generate(request(**fields)), router.inference.GenerateStream(request(**fields))]
    if "session_id" in fields:
        calls.append(
            router.cluster.ExplainPlacement(cluster_pb2.ExplainPlacementRequest(prompt="x", **fields))
        )
    for call in calls:
        error = await refused(call)
        assert (error.code(), fields_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, violations)


async def test_where_clients_authenticate_only_an_admin_chooses_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    people = {role: new_token(role, role, "acme") for role in ("user", "admin")}
    path.touch(mode=0o600)
    path.write_text(json.dumps([entry for _, entry in people.values()]))
    async with running_router(auth_file=str(path)) as router, worker_of_model("a") as worker:
        router.server.set_workers([worker.address])
        metadata = {role: (("authorization", f"Bearer {token}"),) for role, (token, _) in people.items()}
        asked = request(policy="round_robin")
        error = await refused(router.inference.Generate(asked, metadata=metadata["user"]))
        assert reason_of(error) == "PERMISSION_DENIED"
        answer: inference_pb2.GenerateResponse = await router.inference.Generate(
            asked, metadata=metadata["admin"]
        )
        assert answer.finish.worker_id == "a"


async def test_what_a_worker_reused_is_held_against_what_the_index_promised() -> None:
    """The scripted worker always reuses two blocks."""
    async with rig(FakeWorker("w0")) as made:
        index = TwinPrefixIndex(Clock())
        address = made.workers[0].address
        known = {"fingerprint": "model", "block_size": BLOCK_SIZE}
        record = WorkerRecord(
            worker_id=WorkerId("w0"), incarnation=Incarnation("w0-life-1"), address=address, **known
        )
        wanted = generation(1, prompt_tokens=100)
        names = split_names(wanted.block_names)[1:]
        berth = await index.register(record, lease_seconds=600.0)
        await index.apply(berth, Batch(sequence=1, added=tuple(names[:5])))
        made.placer.prefix_lookup = PrefixLookup(index)
        await made.relay.run(wanted, Progress(), lambda chunk: False)
        view = made.fleet.view
        assert (view.promised_blocks, view.stale_blocks) == (5, 3)
