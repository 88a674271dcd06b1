"""Overload of a real router: exact limits, a true queue, and fair turns and shares for tenants."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from blockyard.router.client import AsyncClient, OverloadedError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from .fake_worker import FakeWorker, Script
from .rig import (
    Router,
    fields_of,
    is_idle,
    reason_of,
    refused,
    request,
    running_router,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CALLS = 200
MAX_REQUESTS = 20
MAX_ALONE = MAX_REQUESTS - MAX_REQUESTS // 16
"""Requests that a client may hold while no other holds any."""
MAX_TOKENS = 500
LARGE = {"max_tokens": 450}
"""A few requests of this size are a tenant's quantum."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight() -> AsyncIterator[Router]:
    async with running_router(max_requests=MAX_REQUESTS, max_tokens_admitted=MAX_TOKENS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def roomy() -> AsyncIterator[Router]:
    async with running_router(tenant_weights={"big": 2.0}) as running:
        yield running


def slow_worker() -> FakeWorker:
    """Its requests are there until they are cancelled."""
    return worker_of_model("a", script=lambda submit: Script(step_seconds=60.0))


def full_worker() -> FakeWorker:
    """The same, one at a time."""
    worker = slow_worker()
    worker.max_running = 1
    return worker


def as_tenant(name: str) -> dict[str, Any]:
    return {"metadata": (("blockyard-tenant", name),)}


def retry_seconds(error: grpc.aio.AioRpcError) -> float:
    """RetryInfo's delay, which gRPC's own pushback repeats."""
    status, info = rpc_status.from_call(error), error_details_pb2.RetryInfo()
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    seconds = info.retry_delay.ToTimedelta().total_seconds()
    pushback_ms = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
    assert int(pushback_ms) == pytest.approx(seconds * 1000, abs=1)
    return float(seconds)


async def burst(
    router: Router, *, prompt_tokens: int, limit: int
) -> tuple[list[Any], list[grpc.aio.AioRpcError]]:
    """Make CALLS calls at once. Return the admitted ones, still open, and the errors of the others."""
    fields = {"prompt": None, "prompt_token_ids": {"ids": [7] * prompt_tokens}}
    calls = [router.inference.GenerateStream(request(**fields)) for _ in range(CALLS)]
    watched = [asyncio.create_task(refused(call)) for call in calls]
    admitted_at_once: list[int] = []
    while sum(task.done() for task in watched) < CALLS - limit:
        admitted_at_once.append(len(await router.requests()))
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    admitted_at_once.append(len(await router.requests()))
    assert max(admitted_at_once) == admitted_at_once[-1] == limit
    errors = [task.result() for task in watched if task.done()]
    return [call for call, task in zip(calls, watched, strict=True) if not task.done()], errors


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("prompt_tokens", "limit"),
    [(10, MAX_ALONE), (50, (MAX_TOKENS - MAX_TOKENS // 16) // 50)],
    ids=["requests", "tokens"],
)
async def test_a_burst_meets_a_limit_exactly_and_leaves_nothing_behind(tight, prompt_tokens, limit):
    async with tight.workers(slow_worker()):
        for _ in range(2):
            admitted, errors = await burst(tight, prompt_tokens=prompt_tokens, limit=limit)
            assert (len(admitted), len(errors)) == (limit, CALLS - limit)
            assert {(error.code(), reason_of(error)) for error in errors} == {
                (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
            }
            delays = [retry_seconds(error) for error in errors]
            assert min(delays) >= 0.1
            assert max(delays) <= 30.0
            assert len(set(delays)) > len(delays) / 2, "those who were refused together return apart"
            for call in admitted:
                call.cancel()
            await until(lambda: is_idle(tight))


async def test_a_request_waits_for_a_worker_only_so_long() -> None:
    async with running_router(max_queue_seconds=0.5) as router, router.workers(full_worker()) as (worker,):
        running = router.inference.GenerateStream(request())
        await until(lambda: worker.num_running == 1, seconds=20)
        error = await refused(router.inference.Generate(request(request_id="late"), timeout=20))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert retry_seconds(error) >= 0.1
        assert "late" not in worker.started
        running.cancel()
        await until(lambda: is_idle(router))


async def test_a_request_whose_deadline_passed_in_line_is_never_sent(roomy: Router) -> None:
    async with roomy.workers(full_worker()) as (worker,):
        running = roomy.inference.GenerateStream(request())
        await until(lambda: worker.num_running == 1, seconds=20)
        error = await refused(roomy.inference.Generate(request(request_id="late"), timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        worker.script = lambda submit: Script()
        running.cancel()
        await until(lambda: is_idle(roomy))
        assert await roomy.inference.Generate(request(request_id="next"))
        assert [request_id for request_id in worker.started if request_id in ("late", "next")] == ["next"]


async def wait_in_line(router: Router, tenants: list[str]) -> list[str]:
    """Return the tenants in the order in which their requests ran.

    Send a request for each tenant, in this order, to a worker that is full until all of them wait. Each ends after
    three tokens, whatever its limit.
    """
    async with router.workers(full_worker()) as (worker,):
        running = router.inference.GenerateStream(request(request_id="running"))
        await until(lambda: worker.num_running == 1, seconds=20)
        worker.script = lambda submit: Script(stop_token_at=3)
        calls = []
        for number, tenant in enumerate(tenants):
            message = request(request_id=f"{tenant}:{number}", sampling=LARGE)
            calls.append(router.inference.Generate(message, **as_tenant(tenant)))
        answers = asyncio.gather(*calls)
        await until(lambda: all_are_tokenised(router, len(tenants) + 1), seconds=20)
        worker.max_waiting = 2
        running.cancel()
        await answers
        return [request_id.split(":")[0] for request_id in worker.started[1:]]


async def all_are_tokenised(router: Router, num_requests: int) -> bool:
    return sum(known.prompt_tokens > 0 for known in await router.requests()) == num_requests


async def test_a_tenant_that_comes_late_is_served_in_turn_and_not_behind_the_flood(roomy: Router) -> None:
    order = await wait_in_line(roomy, ["flood"] * 200 + ["late"] * 10)
    assert Counter(order) == {"flood": 200, "late": 10}
    last = max(place for place, tenant in enumerate(order) if tenant == "late")
    assert order[:last].count("flood") < 25


async def admitted_of(router: Router, tenant: str, attempts: int) -> list[Any]:
    """Tries one after another; those that came in, still open."""
    admitted = []
    for _ in range(attempts):
        num_before = len(await router.requests())
        call = router.inference.GenerateStream(request(), **as_tenant(tenant))
        ended = asyncio.create_task(call.code())
        await until(lambda ended=ended, num=num_before + 1: ended.done() or holds(router, num))
        if not ended.done():
            admitted.append(call)
    return admitted


async def holds(router: Router, num_requests: int) -> bool:
    return len(await router.requests()) == num_requests


async def test_a_tenant_is_named_once_and_by_the_rules(tight: Router) -> None:
    for names in (("a/b",), ("",), ("x" * 129,), ("one", "two")):
        metadata = tuple(("blockyard-tenant", name) for name in names)
        for method in (tight.inference.Generate, tight.inference.GenerateStream):
            error = await refused(method(request(), metadata=metadata))
            assert (error.code(), fields_of(error)) == (INVALID, ["blockyard-tenant"])


async def test_our_client_names_its_tenant_and_comes_back_when_it_is_told_to(tight: Router) -> None:
    with pytest.raises(ValueError, match="tenant"):
        AsyncClient(tight.address, tenant="a/b")
    async with (
        tight.workers(slow_worker()) as (worker,),
        AsyncClient(tight.address, tenant="mine", retries=0) as hasty,
        AsyncClient(tight.address, tenant="mine", retries=10) as patient,
    ):
        running = await admitted_of(tight, "mine", MAX_ALONE)
        await until(lambda: worker.num_running == len(running))
        worker.script = lambda submit: Script()
        with pytest.raises(OverloadedError) as refusal:
            await hasty.generate("x", max_tokens=1)
        assert refusal.value.retry_delay_seconds is not None
        answer = asyncio.create_task(patient.generate("x", max_tokens=3))
        await asyncio.sleep(0.05)
        for call in running:
            call.cancel()
        assert len((await answer).outputs[0].token_ids) == 3
