"""Agents' hints on their way from the client to the worker, over real gRPC."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from blockyard.proto.v1 import inference_pb2
from blockyard.router.client import AsyncClient

from .fake_worker import FakeWorker
from .rig import Router, fields_of, refused, running_router, worker_of_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMA = {"type": "object"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[FakeWorker]:
    yield worker_of_model("a")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(worker: FakeWorker) -> AsyncIterator[Router]:
    async with running_router() as running, running.workers(worker):
        yield running


async def test_a_hint_reaches_the_worker_and_a_request_without_one_says_nothing(
    router: Router, worker: FakeWorker
) -> None:
    async with AsyncClient(router.address) as client:
        await client.generate("x", max_tokens=1, session_id="s", expected_pause_seconds=12.5)
        await client.generate("x", max_tokens=1)
    assert [submit.expected_pause_seconds for submit in worker.submits[-2:]] == [12.5, 0.0]


@pytest.mark.parametrize(("given", "priority"), [({}, 99), ({"priority": 0}, 0), ({"priority": -5}, -5)])
async def test_a_prefetch_asks_for_one_token_and_no_structure_last_of_all_and_answers_none(
    router: Router, worker: FakeWorker, given: dict[str, Any], priority: int
) -> None:
    async with AsyncClient(router.address) as client:
        answer = await client.generate(
            "def f(x):",
            prefetch=True,
            max_tokens=50,
            stop=["x"],
            json_schema=SCHEMA,
            return_prompt_token_ids=True,
            **given,
        )
    submit = worker.submits[-1]
    assert (submit.sampling.max_tokens, submit.sampling.min_tokens, submit.priority) == (1, 0, priority)
    assert not submit.sampling.HasField("structured_output")
    assert (answer.text, list(answer.token_ids)) == ("", [])
    assert answer.finish.reason == "length"
    assert answer.finish.completion_tokens == 0
    assert answer.finish.prompt_tokens == len(answer.prompt_token_ids) == submit.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "violations"),
    [
        ({"expected_pause_seconds": 0.0}, ["expected_pause_seconds"]),
        ({"expected_pause_seconds": -1.0}, ["expected_pause_seconds"]),
        ({"expected_pause_seconds": 3600.5}, ["expected_pause_seconds"]),
        ({"expected_pause_seconds": float("nan")}, ["expected_pause_seconds"]),
        ({"expected_pause_seconds": float("inf")}, ["expected_pause_seconds"]),
        (
            {"prefetch": True, "sampling": {"n": 2, "logprobs": 0, "prompt_logprobs": 1}},
            ["sampling.n", "sampling.logprobs", "sampling.prompt_logprobs"],
        ),
        ({"prefetch": True, "sampling": {"beam_width": 2}}, ["sampling.beam_width"]),
    ],
)
async def test_what_a_hint_cannot_mean_is_refused(
    router: Router, fields: dict[str, Any], violations: list[str]
) -> None:
    error = await refused(router.inference.Generate(inference_pb2.GenerateRequest(prompt="x", **fields)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields_of(error) == violations
