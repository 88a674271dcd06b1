"""Cost of traces in a router: `python -m bench.router.tracing [--before CHECKOUT]`.

1. In process: the CPU time of making the spans of one request, alone and with their export.
2. A real router process under load: its CPU time per request without traces, with 1 % of requests sampled, and with
   all, in turns. The spans go by OTLP to a receiver in another process. `--before` adds an earlier commit.

Needs Linux and the extra `otel`.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import AsyncExitStack, contextmanager
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

import grpc
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.naming.fingerprint import tokenizer_fingerprint
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.calls.tracing import Tracing
from blockyard.router.cluster.bookings import Choice, Placed
from blockyard.router.generation.registry import RequestRecord
from blockyard.router.generation.request_trace import AttemptTrace, RequestTrace
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.scoring import Candidate, score_all
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from bench.router.__main__ import MODEL, REQUEST_LINES, REQUEST_TOKENS, STEP_SECONDS, prompt
from bench.router.processes import ROOT, running_workers
from bench.router.systems import System, our_router
from bench.router.trials import request_cost

CALLS = 2_000
SAMPLED = (("traceparent", f"00-{7:032x}-{5:016x}-01"),)
REQUEST = inference_pb2.GenerateRequest(prompt="x", sampling={"max_tokens": 32, "temperature": 0.7})
OFF, FEW, ALL = "no traces", "1 % of requests", "all requests"
SAMPLERS = {
    FEW: {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    ALL: {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
}


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans and counts them."""

    num_spans = 0

    def Export(self, request: Any, context: object) -> trace_service_pb2.ExportTraceServiceResponse:
        self.num_spans += sum(
            len(scope.spans) for part in request.resource_spans for scope in part.scope_spans
        )
        return trace_service_pb2.ExportTraceServiceResponse()


def receive() -> None:
    """Receive until stdin ends. Print the endpoint first, and the number of spans at the end."""
    receiver, server = Receiver(), grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"http://127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(1.0).wait()
    print(receiver.num_spans, flush=True)


@contextmanager
def receiver() -> Iterator[str]:
    """Run a receiver in a process of its own, and yield its endpoint."""
    with subprocess.Popen(
        [sys.executable, "-c", "from bench.router.tracing import receive; receive()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        print(f"{'spans received':32} {int(process.stdout.readline()):9}")


def fill(trace: RequestTrace, task: "asyncio.Task[None]") -> None:
    """Give a trace the times of a common request: one worker, three phases."""
    (score,) = score_all(600, [Candidate("a", "w0")], PlacementConfig())  # type: ignore[arg-type]
    placed = Placed(address="a", names=[], prompt_tokens=600, uncached_tokens=600, blocks=38)
    placed.choice = Choice(trace.arrival, "prefix", score, 4)
    record = RequestRecord(request_id="r", arrival=trace.arrival, task=task, prompt_tokens=600)
    record.progress.num_generated = 32
    trace.record, trace.admitted_at, trace.tokenising = record, trace.arrival, (trace.arrival,) * 2
    attempt = AttemptTrace(
        placing_at=trace.arrival,
        placed=placed,
        worker_id="w0",
        incarnation="w0-life-1",
        sent_at=trace.arrival - 3.0,
        pull=None,
        tokens_before=0,
        clock=time.monotonic,
    )
    for began, kind in enumerate(("QUEUE", "PREFILL", "DECODE")):
        number = session_pb2.PhaseKind.Value(f"PHASE_KIND_{kind}")
        attempt.hear(session_pb2.Phase(kind=number, began_seconds=began / 2, ended_seconds=(began + 1) / 2))
    attempt.note_first_token()
    attempt.over(time.monotonic(), "finished", 32)
    trace.attempts.append(attempt)
    trace.finish_reasons.append("length")


async def microseconds(provider: TracerProvider | None, metadata: tuple[tuple[str, str], ...]) -> float:
    """Return the CPU time of tracing one request, in all threads of the process."""
    tracing, task = Tracing(provider) if provider is not None else None, asyncio.current_task()
    best = inf
    for _ in range(5):
        begin = time.process_time()
        for _ in range(CALLS):
            if tracing is None:
                trace = RequestTrace(arrival=time.monotonic())
                fill(trace, cast("asyncio.Task[None]", task))
                continue
            with tracing.call(REQUEST, metadata, ("demo",)) as made:
                if made is not None:
                    fill(made, cast("asyncio.Task[None]", task))
        if provider is not None:
            provider.force_flush()
        best = min(best, time.process_time() - begin)
    return best / CALLS * 1e6


async def in_process(endpoint: str) -> None:
    off = TracerProvider(shutdown_on_exit=False, sampler=ParentBased(ALWAYS_OFF))
    made, exported = (TracerProvider(shutdown_on_exit=False) for _ in range(2))
    made.add_span_processor(SpanProcessor())
    exported.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint), max_queue_size=20 * CALLS)
    )
    filling = await microseconds(None, ())
    for name, provider, metadata in (
        ("a request that is left out", off, ()),
        ("its spans", made, SAMPLED),
        ("its spans and their export", exported, SAMPLED),
    ):
        cost = await microseconds(provider, metadata)
        print(f"{name:32} {cost - (filling if metadata else 0.0):9.1f} us")
    exported.shutdown()


async def under_load(endpoint: str, before: Path | None, repeats: int, num_requests: int) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        redis = start_private_redis(folder / "redis")
        stack.callback(redis.stop)
        fingerprint = tokenizer_fingerprint(Path(MODEL))
        variants = {} if before is None else {"before": (before, {})}
        variants[OFF] = (ROOT, {})
        for name, sampler in SAMPLERS.items():
            variants[name] = (ROOT, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **sampler})
        systems: dict[str, System] = {}
        for number, (name, (root, environment)) in enumerate(variants.items()):
            workers = await stack.enter_async_context(
                running_workers("bench.router.workers", str(STEP_SECONDS), fingerprint, root=root)
            )
            own = folder / str(number)
            own.mkdir()
            systems[name] = await stack.enter_async_context(
                our_router(
                    MODEL,
                    workers,
                    lambda number: prompt(number, REQUEST_LINES),
                    own,
                    redis.url,
                    environment=environment,
                )
            )
        costs: dict[str, list[float]] = {name: [] for name in systems}
        for repeat in range(repeats + 1):
            for name, system in list(systems.items())[:: -1 if repeat % 2 else 1]:
                trial = await request_cost(
                    system, num_requests, REQUEST_TOKENS, at_once=max(num_requests // 4, 1), idle_seconds=1.0
                )
                if repeat:  # The first one warms up.
                    costs[name].append(trial.router)
    base = median(costs[OFF])
    print(f"CPU time of the router per request, median of {repeats} trials of {num_requests} requests:")
    for name, trials in costs.items():
        share = 100 * (median(trials) / base - 1)
        spread = f"{min(trials):.2f} to {max(trials):.2f}"
        print(f"{name:32} {median(trials):9.3f} ms  {share:+6.1f} %  ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.router.tracing",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256, help="requests of a trial")
    arguments = parser.parse_args()
    before = None if arguments.before is None else arguments.before.resolve()
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    with receiver() as endpoint:
        asyncio.run(in_process(endpoint))
        asyncio.run(under_load(endpoint, before, arguments.repeats, arguments.requests))


if __name__ == "__main__":
    main()
