"""Traces of requests through a real router: one trace from the client's `traceparent` to the last token.

Real workers compute the demo model on CPU. Spans go to OpenTelemetry's exporter in memory.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from blockyard.router.calls.exporting import is_wanted
from blockyard.router.cluster import link
from blockyard.worker.server import WorkerServer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from tests.nightly.router.test_handover import ask, cluster, known_links, prompt

from .fake_worker import FakeWorker, Script
from .rig import Router, refused, request, running_router, until, worker_of_model

__all__ = ["known_links"]
TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
SAMPLED = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"
SIMULATED = {"engine": "simulated", "deterministic": False, "simulated_step_seconds": 0.01}
SECRET_TEXT = "whose-words-are-these"


class Traces:
    """Spans that have been exported, by trace."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **options)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    async def whole(self) -> dict[str, list[ReadableSpan]]:
        """Wait for the one trace, check that it is well formed, and return its spans by name, in order of time."""
        await until(lambda: any(span.kind is SpanKind.SERVER for span in self.spans()), 20.0)
        spans = sorted(self.spans(), key=lambda span: span.start_time or 0)
        assert len({span.context.trace_id for span in spans}) == 1
        by_id = {span.context.span_id: span for span in spans}
        for span in spans:
            assert (span.start_time or 0) <= (span.end_time or 0)
            parent = by_id.get(span.parent.span_id) if span.parent is not None else None
            if parent is not None:
                assert (parent.start_time or 0) <= (span.start_time or 0), span.name
                assert (span.end_time or 0) <= (parent.end_time or 0), span.name
            else:
                assert span.kind is SpanKind.SERVER
        named: dict[str, list[ReadableSpan]] = {}
        for span in spans:
            named.setdefault(span.name, []).append(span)
        return named


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@asynccontextmanager
async def scripted(traces: Traces, *workers: FakeWorker, **settings: Any) -> AsyncIterator[Router]:
    async with (
        running_router(tracer_provider=traces.provider, **settings) as router,
        router.workers(*workers),
    ):
        yield router


async def streamed(router: Router, *, traceparent: str | None = SAMPLED, **fields: Any) -> list[Any]:
    metadata = () if traceparent is None else (("traceparent", traceparent),)
    call = router.inference.GenerateStream(request(SECRET_TEXT, **fields), metadata=metadata, timeout=60.0)
    return [message async for message in call]


async def test_a_request_is_one_trace_from_the_clients_context_to_the_last_token() -> None:
    traces = Traces()
    async with cluster(tracer_provider=traces.provider) as here:
        answer = await streamed(here.router, sampling={"max_tokens": 30, "ignore_eos": True})
        named = await traces.whole()
    (root,) = named.pop("text_completion demo")
    assert (root.context.trace_id, root.parent and root.parent.span_id) == (TRACE_ID, PARENT_ID)
    finish = answer[-1].finish
    told = attributes(root)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "demo"
    assert told["gen_ai.request.max_tokens"] == 30
    assert told["gen_ai.response.id"] == answer[-1].request_id
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["gen_ai.usage.input_tokens"] == finish.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == finish.usage.completion_tokens == 30
    assert told["gen_ai.usage.cache_read.input_tokens"] == finish.usage.cached_tokens
    assert told["gen_ai.response.time_to_first_chunk"] == pytest.approx(
        finish.timing.time_to_first_token_seconds, abs=0.05
    )
    assert (told["blockyard.outcome"], root.status.status_code) == ("OK", StatusCode.UNSET)

    order = ["admission", "tokenise", "placement", "queue", "attempt"]
    assert set(named) == {*order, "worker queue", "prefill", "decode"}
    ends = [named[name][0].end_time or 0 for name in order]
    assert ends == sorted(ends)
    (placement,), (attempt,), (prefill,), (decode,) = (
        named[name] for name in ("placement", "attempt", "prefill", "decode")
    )
    terms = attributes(placement)
    assert terms["blockyard.placement.policy"] == "prefix"
    assert terms["blockyard.placement.candidates"] == 2
    assert terms["blockyard.placement.worker"] == finish.worker_id
    assert terms["blockyard.placement.uncached_tokens"] == finish.usage.prompt_tokens
    whole_ms = sum(value for name, value in terms.items() if name.endswith("_ms"))
    assert terms["blockyard.placement.cost"] == pytest.approx(whole_ms)
    assert attributes(attempt)["blockyard.worker.id"] == finish.worker_id
    assert attributes(attempt)["blockyard.attempt.end"] == "finished"
    assert attributes(prefill) == {"blockyard.steps": 1, "blockyard.tokens": 1}
    assert attributes(decode) == {"blockyard.steps": 29, "blockyard.tokens": 29}
    assert prefill.end_time == decode.start_time
    for span in (prefill, decode):
        assert span.parent is not None
        assert span.parent.span_id == attempt.context.span_id


async def test_a_chunked_prompt_says_in_how_many_steps_it_was_computed() -> None:
    traces = Traces()
    async with cluster(("both",), tracer_provider=traces.provider, max_num_batched_tokens=256) as here:
        await ask(here.client, 1, prompt_token_ids=prompt(1, 900), max_tokens=3)
        named = await traces.whole()
    assert attributes(named["prefill"][0])["blockyard.steps"] == 4


async def test_a_request_over_http_makes_the_same_spans() -> None:
    traces = Traces()
    async with cluster(("both",), tracer_provider=traces.provider, http_port=0, **SIMULATED) as here:
        body = json.dumps({"prompt": SECRET_TEXT, "max_tokens": 5, "stream": True, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nTraceParent: {SAMPLED}\r\nconnection: close\r\n"
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        host, _, port = here.router.server.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((head + length + body).encode())
        assert b"[DONE]" in await reader.read()
        writer.close()
        named = await traces.whole()
    (root,) = named["text_completion demo"]
    assert (root.context.trace_id, root.parent and root.parent.span_id) == (TRACE_ID, PARENT_ID)
    assert attributes(root)["gen_ai.usage.output_tokens"] == 5
    below = {"admission", "tokenise", "placement", "queue", "attempt", "worker queue", "prefill", "decode"}
    assert named.keys() == {root.name, *below}


async def test_a_lost_worker_makes_two_attempts_in_one_trace_and_the_second_one_says_why() -> None:
    traces = Traces()
    async with cluster(tracer_provider=traces.provider, **SIMULATED) as here:
        call = asyncio.create_task(streamed(here.router, sampling={"max_tokens": 100, "ignore_eos": True}))
        await here.until_generating(1, 10)
        (running,) = await here.router.requests()
        lost = next(one for one in here.workers if one.config.worker_id == running.worker_id)
        await die(lost)
        finish = (await call)[-1].finish
        named = await traces.whole()
    assert finish.migrations == 1
    first, second = named["attempt"]
    assert attributes(first)["blockyard.worker.id"] == lost.config.worker_id
    assert attributes(first)["blockyard.attempt.end"] == "lost"
    assert attributes(second)["blockyard.worker.id"] == finish.worker_id != lost.config.worker_id
    assert attributes(second)["blockyard.replay.reason"] == "lost"
    (replay,) = second.links
    assert (replay.context.span_id, dict(replay.attributes or {})) == (
        first.context.span_id,
        {"blockyard.replay.reason": "lost"},
    )
    tokens = [attributes(attempt)["blockyard.attempt.output_tokens"] for attempt in (first, second)]
    assert (sum(tokens), min(tokens) >= 10) == (100, True)
    (root,) = named["text_completion demo"]
    assert attributes(root)["blockyard.migrations"] == 1
    assert len(named["prefill"]) == len(named["decode"]) == 2, (
        "what the dead worker did not report ends with it"
    )
    assert named["decode"][0].end_time == first.end_time


async def die(worker: WorkerServer) -> None:
    """Cut off a worker's streams as the end of its process would."""
    assert worker._server is not None
    await worker._server.stop(None)


@pytest.mark.ci
async def test_a_pull_is_a_span_of_the_worker_that_fetches_with_source_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "PING_SECONDS", 0.05)
    traces = Traces()
    async with cluster(tracer_provider=traces.provider) as here:
        await here.drain(1)
        call = asyncio.create_task(streamed(here.router, sampling={"max_tokens": 150, "ignore_eos": True}))
        await here.until_generating(1, 60)
        await here.client.resume_worker("worker-1")
        await here.drain(0)
        await call
        named = await traces.whole()
        (report,) = here.starts[1].reports
    first, second = named["attempt"]
    assert [attributes(one)["blockyard.attempt.end"] for one in (first, second)] == ["draining", "finished"]
    assert attributes(second)["blockyard.replay.reason"] == "draining"
    (pull,) = named["pull"]
    assert pull.parent is not None
    assert pull.parent.span_id == second.context.span_id
    told = attributes(pull)
    assert told["blockyard.pull.source"] == "worker-0"
    assert told["blockyard.pull.end"] == "whole"
    assert (told["blockyard.pull.blocks"], told["blockyard.pull.bytes"]) == (
        report.num_blocks,
        report.num_bytes,
    )
    assert "blockyard.pull.saved_ms" in told


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


async def test_no_span_has_a_prompt_or_an_answer() -> None:
    traces = Traces()
    async with scripted(traces, worker_of_model("a")) as router:
        answer = await streamed(router)
        await traces.whole()
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


async def test_the_sampler_decides_where_the_client_says_nothing() -> None:
    traces = Traces(sampler=ParentBased(ALWAYS_OFF))
    async with scripted(traces, worker_of_model("a")) as router:
        await streamed(router, traceparent=None)
        await streamed(router)
        await traces.whole()
    assert {span.context.trace_id for span in traces.spans()} == {TRACE_ID}


def test_an_endpoint_or_the_console_switches_traces_on_and_two_variables_switch_them_off() -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    assert not is_wanted({})
    assert is_wanted(endpoint)
    assert is_wanted({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4317"})
    assert is_wanted({"OTEL_TRACES_EXPORTER": "console"})
    assert not is_wanted(endpoint | {"OTEL_SDK_DISABLED": "true"})
    assert not is_wanted(endpoint | {"OTEL_TRACES_EXPORTER": "none"})
