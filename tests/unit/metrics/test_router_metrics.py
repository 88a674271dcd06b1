"""Metrics of a router's requests: each counts once, by its outcome, with the times and tokens that its client saw."""

import asyncio

import grpc
import pytest
from blockyard.proto.metrics.readings import Distribution, Readings
from blockyard.proto.metrics.table import MOST_TENANTS, OTHER_TENANTS
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.generation.metrics import TenantCounts
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.fake_worker import Script
from tests.unit.router.rig import (
    FOREVER,
    Router,
    is_idle,
    reason_of,
    refused,
    request,
    running_router,
    until,
    worker_of_model,
)

STEP_SECONDS = 0.05
TOKENS = 8


async def readings_once(router: Router, requests: dict[str, int]) -> Readings:
    """Wait until the readings count these requests by outcome, and return them."""
    await until(lambda: router.server.readings.get("requests") == requests)
    return router.server.readings


def distribution(readings: Readings, name: str) -> Distribution:
    found = readings[name]
    assert isinstance(found, Distribution)
    return found


async def test_tokens_and_times_are_those_that_the_client_was_told() -> None:
    worker = worker_of_model("w0", script=lambda submit: Script(step_seconds=STEP_SECONDS))
    async with running_router() as router, router.workers(worker):
        answer = await router.inference.Generate(
            request(sampling={"max_tokens": TOKENS, "n": 2, "ignore_eos": True})
        )
        readings = await readings_once(router, {"OK": 1})
    usages = [output.finish.usage for output in answer.outputs]
    assert (
        readings["router_generated_tokens"] == sum(usage.completion_tokens for usage in usages) == 2 * TOKENS
    )
    assert readings["router_prompt_tokens"] == usages[0].prompt_tokens
    assert readings["router_cached_tokens"] == usages[0].cached_tokens > 0
    assert readings["outputs"] == {"length": 2}
    timing = answer.outputs[0].finish.timing
    first_token = distribution(readings, "time_to_first_token_seconds")
    assert first_token.count == 1
    assert first_token.sum == pytest.approx(timing.time_to_first_token_seconds, abs=STEP_SECONDS / 2)
    gaps = distribution(readings, "inter_token_latency_seconds")
    assert gaps.count == 2 * (TOKENS - 1)
    assert gaps.sum >= 2 * (TOKENS - 1) * STEP_SECONDS * 0.9
    whole = distribution(readings, "request_seconds")
    assert (whole.count, distribution(readings, "queue_seconds").count) == (1, 1)
    queue, prefill, decode = (
        distribution(readings, f"{name}_seconds") for name in ("queue", "prefill", "decode")
    )
    assert queue.sum < first_token.sum < whole.sum
    assert queue.sum + prefill.sum == pytest.approx(first_token.sum)
    assert (prefill.count, decode.count) == (1, 1)
    assert (TOKENS - 1) * STEP_SECONDS * 0.9 <= decode.sum < whole.sum - first_token.sum + STEP_SECONDS
    for name, tokens in (("prompt", usages[0].prompt_tokens), ("generated", 2 * TOKENS)):
        of_request = distribution(readings, f"request_{name}_tokens")
        assert (of_request.count, of_request.sum) == (1, tokens)


async def test_a_tenants_requests_tokens_and_refusals_are_his() -> None:
    worker = worker_of_model("w0", script=lambda submit: Script(step_seconds=STEP_SECONDS))

    def of(tenant: str) -> dict[str, object]:
        return {"metadata": (("blockyard-tenant", tenant),)}

    async with running_router(max_requests=2) as router, router.workers(worker):
        limited = {"max_tokens": TOKENS, "ignore_eos": True}
        answer = await router.inference.Generate(request(sampling=limited), **of("acme"))
        await router.inference.Generate(request(sampling=limited))
        await refused(router.inference.Generate(request(sampling={"temperature": -1.0}), **of("acme")))
        running = router.inference.GenerateStream(request(sampling={**FOREVER, "n": 2}), **of("globex"))
        await running.read()
        assert reason_of(await refused(router.inference.Generate(request(), **of("acme")))) == "OVERLOADED"
        running.cancel()
        await until(lambda: is_idle(router))
        readings = await readings_once(
            router, {"OK": 2, "INVALID_REQUEST": 1, "OVERLOADED": 1, "CANCELLED": 1}
        )
    prompt = answer.outputs[0].finish.usage.prompt_tokens
    assert readings["tenant_requests"] == {"other": 1, "acme": 3, "globex": 1}
    assert readings["tenant_refusals"] == {"other": 0, "acme": 1, "globex": 0}
    assert readings["tenant_prompt_tokens"] == {"other": prompt, "acme": prompt, "globex": prompt}
    generated = readings["tenant_generated_tokens"]
    assert isinstance(generated, dict)
    assert (generated["other"], generated["acme"]) == (TOKENS, TOKENS)
    assert sum(generated.values()) == readings["router_generated_tokens"]
    assert distribution(readings, "request_generated_tokens").sum == readings["router_generated_tokens"]


@given(st.lists(st.integers(0, 60).map(lambda number: f"tenant-{number}" if number else "")))
def test_tenants_are_at_most_so_many_and_their_sum_is_all(tenants: list[str]) -> None:
    counts = TenantCounts()
    for tenant in tenants:
        counts.of("never-served").refusals += 1
        counts.served(tenant).requests += 1
    assert not tenants or "never-served" not in counts.readings()["tenant_refusals"]
    read = counts.readings()["tenant_requests"]
    assert isinstance(read, dict)
    assert len(read) <= MOST_TENANTS
    assert sum(read.values()) == len(tenants)
    first = list(dict.fromkeys(filter(None, tenants)))[: MOST_TENANTS - 1]
    assert read == {OTHER_TENANTS: len(tenants) - sum(map(tenants.count, first))} | {
        tenant: tenants.count(tenant) for tenant in first
    }


async def test_every_end_is_counted_once_by_its_reason() -> None:
    worker = worker_of_model("w0", script=lambda submit: Script(step_seconds=STEP_SECONDS))
    async with running_router(max_requests=2) as router, router.workers(worker):
        await refused(router.inference.Generate(request(model="another")))
        await refused(router.inference.Generate(request(sampling={"temperature": -1.0})))
        streams = [
            router.inference.GenerateStream(request(sampling=FOREVER, request_id=name)) for name in "ab"
        ]
        for stream in streams:
            await stream.read()
        assert reason_of(await refused(router.inference.Generate(request()))) == "OVERLOADED"
        streams[0].cancel()
        await router.inference.Abort(inference_pb2.AbortRequest(request_id="b"))
        await until(lambda: is_idle(router))
        ends = ("MODEL_NOT_FOUND", "INVALID_REQUEST", "OVERLOADED", "CANCELLED", "ABORTED")
        readings = await readings_once(router, dict.fromkeys(ends, 1))
    assert distribution(readings, "request_seconds").count == 0, "only what ended well has a time"
    assert readings["outputs"] == {}


async def test_requests_are_running_once_a_worker_has_them_and_waiting_before() -> None:
    worker = worker_of_model("w0", script=lambda submit: Script(step_seconds=STEP_SECONDS))
    async with running_router(no_worker_seconds=30.0, max_requests=7) as router:
        async with router.workers(worker):
            running = router.inference.GenerateStream(request(sampling=FOREVER))
            await running.read()
            await until(lambda: router.server.readings["router_running"] == 1)
            assert router.server.readings["workers"] == {"ready": 1}
            assert (
                router.server.readings["requests_admitted"],
                router.server.readings["requests_limit"],
            ) == (1, 7)
            running.cancel()
            await until(lambda: is_idle(router))
        waiting = asyncio.ensure_future(router.inference.Generate(request()))
        await until(lambda: router.server.readings["router_waiting"] == 1)
        assert (router.server.readings["router_running"], router.server.readings["workers"]) == (0, {})
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_a_lost_worker_counts_as_a_migration_and_the_tokens_only_once() -> None:
    def dying(submit: session_pb2.Submit) -> Script:
        return Script(die_after=3, step_seconds=0.01)

    first, second = worker_of_model("w0", script=dying), worker_of_model("w1", script=dying)
    async with running_router() as router, router.workers(first, second):

        def reliable(submit: session_pb2.Submit) -> Script:
            return Script(step_seconds=0.01)

        call = router.inference.Generate(request(sampling={"max_tokens": 20, "ignore_eos": True}))
        await until(lambda: first.submits or second.submits)
        first.script = second.script = reliable
        answer = await call
        readings = await readings_once(router, {"OK": 1})
    assert readings["migrations"] == answer.outputs[0].finish.migrations == 1
    assert readings["router_generated_tokens"] == 20
    assert distribution(readings, "time_to_first_token_seconds").count == 1
    assert readings["router_prompt_tokens"] == answer.outputs[0].finish.usage.prompt_tokens


async def test_a_refused_call_says_grpcs_code_and_the_counter_our_reason() -> None:
    async with running_router(no_worker_seconds=0.1) as router:
        error = await refused(router.inference.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await readings_once(router, {reason_of(error): 1})


async def test_a_prefetch_counts_its_prompt_but_no_time_to_a_first_token() -> None:
    async with running_router() as router, router.workers(worker_of_model("w0")):
        answer = await router.inference.Generate(request(prefetch=True))
        readings = await readings_once(router, {"OK": 1})
    assert readings["router_prompt_tokens"] == answer.finish.usage.prompt_tokens > 0
    assert (readings["router_generated_tokens"], readings["outputs"]) == (0, {"length": 1})
    for name in ("time_to_first_token", "prefill", "decode"):
        assert distribution(readings, f"{name}_seconds").count == 0
    assert distribution(readings, "request_generated_tokens").count == 0
