"""Exporting: whether a router makes traces, and the exporter that sends them by OTLP, or writes them to the log.

OpenTelemetry's own environment variables decide: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and the others.
Without them nothing of OpenTelemetry's traces is imported. Does not own the spans (tracing.py).
"""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.router.calls.tracing import Tracing
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

EXPORTER = "OTEL_TRACES_EXPORTER"
"""Variable with `otlp`, `console` for the router's own log, or `none`."""
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
    """Return whether the environment says where traces go, and does not switch them off."""
    exporter = environment.get(EXPORTER, "")
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"
    return not is_off and (exporter == "console" or any(environment.get(name) for name in ENDPOINTS))


@asynccontextmanager
async def tracing_of(router_id: str, provider: "TracerProvider | None") -> AsyncIterator["Tracing | None"]:
    """Yield the tracing of a router, or None where nobody wants traces.

    `provider` makes the spans if the caller has one. Without it, spans go where the environment says. Raises ValueError
    for a protocol that is unknown.
    """
    if provider is None and not is_wanted(os.environ):
        yield None
        return
    own = None
    try:
        from blockyard.router.calls.tracing import Tracing

        if provider is None:
            provider = own = _exporting_provider(router_id)
    except ImportError as error:
        logger.warning("no traces: %s is missing, which the extra [otel] has", error.name)
        yield None
        return
    try:
        yield Tracing(provider)
    finally:
        if own is not None:
            await _close(own)


def _exporting_provider(router_id: str) -> "TracerProvider":
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "grpc")
    if protocol not in EXPORTERS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be {' or '.join(EXPORTERS)}, not {protocol!r}")
    exporter = (
        ConsoleSpanExporter(out=sys.stderr)
        if os.environ.get(EXPORTER) == "console"
        else import_module(EXPORTERS[protocol]).OTLPSpanExporter()
    )
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
