"""Traces of requests through a router with scripted workers: whose trace it is, and what it says of ends and errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from blockyard.router.calls.exporting import is_wanted
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import StatusCode

from .fake_worker import FakeWorker, Script
from .rig import Router, refused, request, running_router, worker_of_model
from .trace_rig import SAMPLED, SECRET_TEXT, TRACE_ID, Traces, attributes, streamed


@asynccontextmanager
async def scripted(traces: Traces, *workers: FakeWorker, **settings: Any) -> AsyncIterator[Router]:
    async with (
        running_router(tracer_provider=traces.provider, **settings) as router,
        router.workers(*workers),
    ):
        yield router


async def test_an_error_has_the_contracts_reason_and_no_text_of_client_or_exception() -> None:
    traces = Traces()
    async with scripted(traces, worker_of_model("a"), max_migrations=0) as router:
        metadata = (("traceparent", SAMPLED),)
        wrong = request(SECRET_TEXT, model=SECRET_TEXT)
        error = await refused(router.inference.GenerateStream(wrong, metadata=metadata))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        named = await traces.whole()
    (root,) = named["text_completion demo"]
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "MODEL_NOT_FOUND")
    assert attributes(root)["error.type"] == attributes(root)["blockyard.outcome"] == "MODEL_NOT_FOUND"
    assert not root.events
    assert SECRET_TEXT not in root.to_json()


async def test_no_span_has_a_prompt_or_an_answer_and_the_sampler_decides_where_the_client_says_nothing():
    traces = Traces(sampler=ParentBased(ALWAYS_OFF))
    async with scripted(traces, worker_of_model("a")) as router:
        await streamed(router, traceparent=None)
        answer = await streamed(router)
        await traces.whole()
    assert {span.context.trace_id for span in traces.spans()} == {TRACE_ID}
    text = "".join(message.delta.text for message in answer)
    for span in traces.spans():
        written = span.to_json()
        assert SECRET_TEXT not in written
        assert text not in written


async def test_a_request_that_finds_no_worker_shows_the_wait_for_one() -> None:
    traces = Traces()
    async with running_router(tracer_provider=traces.provider, no_worker_seconds=0.2) as router:
        await refused(router.inference.GenerateStream(request(), metadata=(("traceparent", SAMPLED),)))
        named = await traces.whole()
    (root,) = named["text_completion demo"]
    assert attributes(root)["error.type"] == "NO_WORKERS"


async def test_a_client_that_leaves_is_no_error() -> None:
    traces = Traces()
    async with scripted(traces, worker_of_model("a", script=lambda submit: Script(hang_after=3))) as router:
        call = router.inference.GenerateStream(request(), metadata=(("traceparent", SAMPLED),))
        await call.read()
        call.cancel()
        named = await traces.whole()
    (root,) = named["text_completion demo"]
    assert (attributes(root)["blockyard.outcome"], root.status.status_code) == ("CANCELLED", StatusCode.UNSET)
    assert attributes(named["attempt"][0])["blockyard.attempt.end"] == "stopped"


async def test_the_clients_choice_not_to_sample_is_kept_and_the_worker_reports_nothing() -> None:
    traces = Traces()
    async with scripted(traces, worker := worker_of_model("a")) as router:
        await streamed(router, traceparent=SAMPLED[:-1] + "0")
        await streamed(router)
        await traces.whole()
    assert {span.context.trace_id for span in traces.spans()} == {TRACE_ID}
    assert len(traces.spans()) == 6, "one request's"
    assert [submit.wants_phases for submit in worker.submits] == [False, True]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        "ff-" + SAMPLED[3:],
        SAMPLED.upper(),
        SAMPLED.replace("b7ad6b7169203331", "0" * 16),
        "x" * 5000,
    ],
)
async def test_a_bad_traceparent_is_ignored(traceparent: str) -> None:
    traces = Traces()
    async with scripted(traces, worker_of_model("a")) as router:
        await streamed(router, traceparent=traceparent)
        named = await traces.whole()
    (root,) = named["text_completion demo"]
    assert root.parent is None
    assert root.context.trace_id != TRACE_ID


def test_an_endpoint_or_the_console_switches_traces_on_and_two_variables_switch_them_off() -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    assert not is_wanted({})
    assert is_wanted(endpoint)
    assert is_wanted({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4317"})
    assert is_wanted({"OTEL_TRACES_EXPORTER": "console"})
    assert not is_wanted(endpoint | {"OTEL_SDK_DISABLED": "true"})
    assert not is_wanted(endpoint | {"OTEL_TRACES_EXPORTER": "none"})
