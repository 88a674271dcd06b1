"""Exporting: whether a router makes traces, and the exporter that sends them by OTLP.

OpenTelemetry's own environment variables decide: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and the others.
Without an endpoint nothing of OpenTelemetry is imported. Does not own the spans (tracing.py).
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.router.calls.tracing import Tracing
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
"""Modules of the exporters by protocol. The extra `otel` has the first."""
CLOSE_SECONDS = 5.0
"""Time to export the last spans when a router ends."""
POLL_SECONDS = 0.02


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the environment names an endpoint for traces, and does not switch them off."""
    is_off = (
        environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    )
    return not is_off and any(environment.get(name) for name in ENDPOINTS)


@asynccontextmanager
async def tracing_of(router_id: str, provider: "TracerProvider | None") -> AsyncIterator["Tracing | None"]:
    """Yield the tracing of a router, or None where nobody wants traces.

    `provider` makes the spans if the caller has one. Without it, spans go where the environment says. Raises ValueError
    for a protocol that is unknown.
    """
    if provider is None and not is_wanted(os.environ):
        yield None
        return
    try:
        from blockyard.router.calls.tracing import Tracing

        own = _exporting_provider(router_id) if provider is None else None
    except ImportError as error:
        logger.warning("no traces: %s is missing; `pip install blockyard[otel]` has it", error.name)
        yield None
        return
    try:
        yield Tracing(provider or own)
    finally:
        if own is not None:
            await _close(own)


def _exporting_provider(router_id: str) -> "TracerProvider":
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "grpc")
    if protocol not in EXPORTERS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be {' or '.join(EXPORTERS)}, not {protocol!r}")
    exporter = import_module(EXPORTERS[protocol]).OTLPSpanExporter()
    service = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "blockyard-router"}
    resource = Resource.create({**service, SERVICE_INSTANCE_ID: router_id})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


async def _close(provider: "TracerProvider") -> None:
    """Export what waits, for CLOSE_SECONDS at most. OpenTelemetry itself would wait longer for a dead collector."""
    closing = Thread(target=provider.shutdown, name="end of tracing", daemon=True)
    closing.start()
    deadline = asyncio.get_running_loop().time() + CLOSE_SECONDS
    while closing.is_alive():
        if asyncio.get_running_loop().time() >= deadline:
            logger.warning("the last traces were not exported within %g s", CLOSE_SECONDS)
            return
        await asyncio.sleep(POLL_SECONDS)
