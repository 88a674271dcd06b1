"""Traces leave a router by OTLP: a real receiver decodes them, and a dead one harms nothing."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from blockyard.router.calls.exporting import CLOSE_SECONDS
from blockyard.router.server import RouterServer
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from .rig import config, request, running_router, until, worker_of_model

TRACE_ID, PARENT_ID = bytes(range(1, 17)), bytes(range(1, 9))
SAMPLED = f"00-{TRACE_ID.hex()}-{PARENT_ID.hex()}-01"
UNUSED = "http://127.0.0.1:9"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Receiver of traces, on a real port."""

    def __init__(self) -> None:
        self.received: list[trace_pb2.ResourceSpans] = []

    async def Export(
        self, message: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.received += message.resource_spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> dict[str, trace_pb2.Span]:
        return {
            span.name: span for part in self.received for scope in part.scope_spans for span in scope.spans
        }


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(None)


async def ask() -> None:
    async with running_router() as router, router.workers(worker_of_model("a")):
        call = router.inference.GenerateStream(request(), metadata=(("traceparent", SAMPLED),))
        assert [message async for message in call]


async def test_a_collector_gets_the_whole_trace_by_the_routers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        await ask()
        await until(lambda: collector.received)
    spans = collector.spans()
    assert {"text_completion demo", "admission", "tokenise", "placement", "queue", "attempt"} <= spans.keys()
    root = spans["text_completion demo"]
    assert (root.kind, root.parent_span_id) == (trace_pb2.Span.SPAN_KIND_SERVER, PARENT_ID)
    assert {span.trace_id for span in spans.values()} == {TRACE_ID}
    assert {span.parent_span_id for name, span in spans.items() if name == "attempt"} == {root.span_id}
    told = {one.key: one.value for one in root.attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == 20
    (reason,) = told["gen_ai.response.finish_reasons"].array_value.values
    assert reason.string_value == "length"
    resource = {one.key: one.value.string_value for one in collector.received[0].resource.attributes}
    assert resource["service.name"] == "blockyard-router"
    assert resource["service.instance.id"] == "router"


async def test_without_a_collector_the_console_shows_the_spans(monkeypatch, capsys):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    await ask()
    assert '"name": "text_completion demo"' in capsys.readouterr().err


async def test_a_dead_collector_costs_no_answer_and_bounds_the_routers_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", UNUSED)
    async with asyncio.timeout(CLOSE_SECONDS + 20):
        await ask()


async def test_a_router_does_not_start_with_an_unknown_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", UNUSED)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "pigeon")
    with pytest.raises(ValueError, match="'pigeon'"):
        await RouterServer(config()).start()


async def test_without_the_extra_a_router_serves_and_says_what_is_missing(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", UNUSED)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    await ask()
    assert "which the extra [otel] has" in caplog.text
