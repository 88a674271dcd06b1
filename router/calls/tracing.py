"""Tracing: makes the OpenTelemetry spans of a request once it has ended, from the times in its RequestTrace.

- `chat MODEL`, `text_completion MODEL` or `embeddings MODEL`: the request, under the client's `traceparent`;
- below it `admission` and `tokenise`, then `placement`, `queue` and `attempt` for each worker that got the request;
- below an attempt `pull`, `worker queue`, `prefill`, `decode`, `preempted` and `swapped`.

Imported only where traces are wanted: nothing else of the router knows OpenTelemetry. Spans have numbers, names of
workers and policies, and ids, but never a prompt, a token, or the text of an error. Does not own the times
(generation/request_trace.py), the export (exporting.py) or what surrounds a call (generating.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite

from blockyard.proto.v1 import inference_pb2
from blockyard.router.generation.metrics import CANCELLED, OK, outcome_of
from blockyard.router.generation.request_trace import AttemptTrace, RequestTrace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Tracer
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

logger = logging.getLogger(__name__)

SCOPE = "blockyard"
_SCOPE = InstrumentationScope(SCOPE)
HEADERS = frozenset({"traceparent", "tracestate"})
MAX_HEADER_CHARACTERS = 512
Attributes = Mapping[str, str | int | float | Sequence[str]]


class Tracing:
    """Traces of one router. `clock` is that of its requests."""

    def __init__(self, provider: TracerProvider, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer = provider.get_tracer(SCOPE)
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock

    @contextmanager
    def call(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest,
        metadata: Iterable[tuple[str, str | bytes]],
        models: Sequence[str],
    ) -> Iterator[RequestTrace | None]:
        """Trace a request for the life of the context. Yield its trace, or None where the sampler leaves it out.

        `models` are the names of the cluster's model, its id first.
        """
        arrival = self._clock()
        epoch_ns = time.time_ns() - _ns(arrival)
        operation = _operation(request)
        # An unknown name is any text of the client.
        model = request.model if request.model in models else models[0]
        span = self._tracer.start_span(
            f"{operation} {model}",
            self._parent(metadata),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.request.model": model},
            start_time=epoch_ns + _ns(arrival),
        )
        if not span.is_recording():
            yield None
            return
        trace, outcome = RequestTrace(arrival=arrival), OK
        try:
            yield trace
        except (asyncio.CancelledError, Exception) as error:
            outcome = outcome_of(error)
            raise
        finally:
            try:
                self._end(
                    span, trace, epoch_ns, outcome, {"gen_ai.response.model": models[0], **_asked(request)}
                )
            except Exception as error:  # A trace may be lost, but no answer with it.
                logger.error("a trace is incomplete: %s", type(error).__name__)

    def _parent(self, metadata: Iterable[tuple[str, str | bytes]]) -> Context:
        """Return the client's context, or an empty one where it sends none that is valid."""
        carrier = {
            name: value
            for name, value in metadata
            if name in HEADERS and isinstance(value, str) and len(value) <= MAX_HEADER_CHARACTERS
        }
        return self._propagator.extract(carrier, Context()) if carrier else Context()

    def _end(
        self, span: Span, trace: RequestTrace, epoch_ns: int, outcome: str, attributes: Attributes
    ) -> None:
        now = self._clock()
        assert isinstance(self._tracer, Tracer), "only the SDK's tracer makes a span that records"
        spans, root = _Spans(self._tracer, epoch_ns), span.get_span_context()
        if trace.admitted_at is not None:
            spans.add("admission", root, trace.arrival, trace.admitted_at)
        if trace.tokenising is not None:
            spans.add("tokenise", root, *trace.tokenising)
        earlier: tuple[SpanContext, str] | None = None
        for number, attempt in enumerate(trace.attempts):
            earlier = _add_attempt(spans, root, attempt, number, earlier)
        if trace.placing_at is not None:
            spans.add("placement", root, trace.placing_at, now)
        span.set_attributes({**attributes, **_answered(trace), "blockyard.outcome": outcome})
        if outcome not in (OK, CANCELLED):
            span.set_attribute("error.type", outcome)
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end(epoch_ns + _ns(now))


class _Spans:
    """Makes spans that have ended, below one that is sampled.

    They pass by the tracer, which would ask the sampler about each and copy every attribute. All spans of a request
    would take the event loop twice as long (bench/router/tracing.py).
    """

    def __init__(self, tracer: Tracer, epoch_ns: int) -> None:
        self._tracer, self._epoch_ns = tracer, epoch_ns

    def add(
        self,
        name: str,
        parent: SpanContext,
        began_at: float,
        ended_at: float,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
    ) -> SpanContext:
        began_ns, ended_ns = self._epoch_ns + _ns(began_at), self._epoch_ns + _ns(ended_at)
        context = SpanContext(
            parent.trace_id,
            self._tracer.id_generator.generate_span_id(),
            is_remote=False,
            trace_flags=parent.trace_flags,
            trace_state=parent.trace_state,
        )
        span = ReadableSpan(
            name,
            context,
            parent,
            self._tracer.resource,
            attributes or {},
            links=links,
            start_time=began_ns,
            end_time=max(began_ns, ended_ns),
            instrumentation_scope=_SCOPE,
        )
        self._tracer.span_processor.on_end(span)
        return context


def _add_attempt(
    spans: _Spans,
    root: SpanContext,
    attempt: AttemptTrace,
    number: int,
    earlier: tuple[SpanContext, str] | None,
) -> tuple[SpanContext, str]:
    """Add one worker's part, and the choice of the worker. Return the attempt's context and why it ended."""
    choice = attempt.placed.choice
    assert choice is not None, "the placer notes each choice"
    spans.add("placement", root, attempt.placing_at, choice.at, _placement(attempt))
    spans.add("queue", root, choice.at, attempt.sent_at)
    links = [] if earlier is None else [Link(earlier[0], {"blockyard.replay.reason": earlier[1]})]
    attributes: dict[str, str | int | float] = {
        "blockyard.attempt.number": number,
        "blockyard.attempt.end": attempt.end,
        "blockyard.worker.id": attempt.worker_id,
        "blockyard.worker.incarnation": attempt.incarnation,
        "blockyard.attempt.output_tokens": attempt.num_tokens,
    }
    if earlier is not None:
        attributes["blockyard.replay.reason"] = earlier[1]
    inner = spans.add("attempt", root, attempt.sent_at, attempt.ended_at, attributes, links)
    pull, has_pull = attempt.pull, False
    for phase in attempt.spans():
        is_pull = phase.name == "pull"
        has_pull |= is_pull
        counts = {"blockyard.steps": phase.steps, "blockyard.tokens": phase.tokens} if phase.steps else None
        spans.add(phase.name, inner, phase.began_at, phase.ended_at, _pull(attempt) if is_pull else counts)
    if pull is not None and pull.end and not has_pull:
        ended_at = pull.began_at + pull.seconds(pull.ended_at or pull.began_at)
        spans.add("pull", inner, pull.began_at, ended_at, _pull(attempt))
    return inner, attempt.end


def _placement(attempt: AttemptTrace) -> Attributes:
    """Return the terms of the chosen worker's cost, as `blockyard explain` shows them. A term of 0 is left out, because
    each attribute costs time."""
    choice = attempt.placed.choice
    assert choice is not None
    terms = (
        *("queue_ms", "prefill_ms", "host_load_ms", "pull_ms", "decode_ms", "memory_ms", "adapter_ms"),
        "interference_ms",
    )
    counts = ("cached_tokens", "host_cached_tokens", "pulled_tokens", "uncached_tokens")
    return {
        "blockyard.placement.policy": choice.policy,
        "blockyard.placement.candidates": choice.num_candidates,
        "blockyard.placement.worker": choice.score.worker_id,
        "blockyard.placement.cost": choice.score.cost,
        "blockyard.placement.split": attempt.placed.is_split,
        **{
            f"blockyard.placement.{name}": value
            for name in (*terms, *counts)
            if (value := getattr(choice.score, name))
        },
    }


def _pull(attempt: AttemptTrace) -> Attributes:
    pull = attempt.pull
    if pull is None:
        return {}
    attributes: dict[str, str | int | float] = {
        "blockyard.pull.source": pull.plan.source.worker_id,
        "blockyard.pull.end": pull.end,
        "blockyard.pull.blocks": pull.num_blocks,
        "blockyard.pull.bytes": pull.num_bytes,
        "blockyard.pull.planned_ms": pull.plan.time_ms,
    }
    if pull.took_seconds is not None and isfinite(pull.plan.saved_ms):
        took_ms = 1000 * pull.took_seconds
        # What is not whole is computed after all.
        planned_ms = pull.plan.saved_ms + pull.plan.time_ms if pull.end == "whole" else 0.0
        attributes["blockyard.pull.saved_ms"] = planned_ms - took_ms
    return attributes


def _operation(request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest) -> str:
    if isinstance(request, inference_pb2.EmbedRequest):
        return "embeddings"
    return "chat" if request.WhichOneof("input") == "chat" else "text_completion"


def _asked(request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest) -> Attributes:
    if isinstance(request, inference_pb2.EmbedRequest):
        return {}
    sampling = request.sampling
    names = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "n": "choice.count"}
    return {
        f"gen_ai.request.{name}": getattr(sampling, field)
        for field, name in names.items()
        if sampling.HasField(field)
    }


def _answered(trace: RequestTrace) -> Attributes:
    if trace.record is None:
        return {}
    record, progress = trace.record, trace.record.progress
    attributes: dict[str, str | int | float | Sequence[str]] = {
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": progress.num_generated,
        "gen_ai.usage.cache_read.input_tokens": progress.cached_tokens or 0,
        **({"blockyard.migrations": progress.num_migrations} if progress.num_migrations else {}),
    }
    if trace.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = trace.finish_reasons
    if trace.first_token_at is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = trace.first_token_at - trace.arrival
    return attributes


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
