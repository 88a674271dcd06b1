"""Traces that a router exports to memory, for tests with scripted workers here and real ones in tests/nightly."""

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from .rig import Router, request, until

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
SAMPLED = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"
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


async def streamed(router: Router, *, traceparent: str | None = SAMPLED, **fields: Any) -> list[Any]:
    metadata = () if traceparent is None else (("traceparent", traceparent),)
    call = router.inference.GenerateStream(request(SECRET_TEXT, **fields), metadata=metadata, timeout=60.0)
    return [message async for message in call]
