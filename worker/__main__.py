"""`python -m blockyard.worker --model FOLDER`: one worker in this process, without Ray.

The cluster secret comes from BLOCKYARD_CLUSTER_SECRET, never from the command line, where everybody could read it.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterable

from blockyard.proto.logs import configure_logging
from blockyard.proto.tls_files import session_tls
from blockyard.worker.config import (
    DEFAULT_GRACE_SECONDS,
    DEFAULT_STALL_SECONDS,
    WorkerConfig,
    add_engine_arguments,
    engine_config,
)
from blockyard.worker.server import WorkerServer
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger("blockyard.worker")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
COUNTERS = {
    "prompt_tokens",
    "generated_tokens",
    "cached_tokens",
    "preemptions",
    "swaps",
    "index_errors",
    "index_resyncs",
    "index_damages",
}


class StatsCollector(Collector):
    """A worker's stats as Prometheus metrics, read when scraped."""

    def __init__(self, server: WorkerServer) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        for name, value in self._server.stats().items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            metric = family(f"blockyard_{name}", name.replace("_", " "), labels=["worker"])
            metric.add_metric([self._server.config.worker_id], value)
            yield metric


def parse(arguments: list[str]) -> WorkerConfig:
    parser = argparse.ArgumentParser(prog="python -m blockyard.worker", description=__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--worker-id", default="worker-0")
    parser.add_argument("--cluster", default="default")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--advertise-host", default=None)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="Prometheus endpoint; 0 takes a free port, -1 has none"
    )
    parser.add_argument("--pool-map-path", default=None, help="text map of the pool, rewritten each second")
    parser.add_argument("--session-tls-cert", metavar="PEM", help="shown to routers, which all have the same")
    parser.add_argument("--session-tls-key", metavar="PEM")
    parser.add_argument("--session-tls-ca", metavar="PEM", help="of the routers' certificates")
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=DEFAULT_STALL_SECONDS,
        help="an engine that has finished no step for so long ends the worker; default: %(default)s",
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=DEFAULT_GRACE_SECONDS,
        help="at SIGTERM, for what runs to finish before it goes on on other workers; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    return WorkerConfig(
        engine=engine_config(options),
        worker_id=options.worker_id,
        cluster=options.cluster,
        cluster_secret=os.environ.get("BLOCKYARD_CLUSTER_SECRET", ""),
        host=options.host,
        advertise_host=options.advertise_host,
        port=options.port,
        session_tls=session_tls(options.session_tls_cert, options.session_tls_key, options.session_tls_ca),
        redis_url=os.environ.get("BLOCKYARD_REDIS_URL"),
        metrics_port=None if options.metrics_port < 0 else options.metrics_port,
        pool_map_path=options.pool_map_path,
        grace_seconds=options.grace_seconds,
        stall_seconds=options.stall_seconds,
    )


async def serve(config: WorkerConfig) -> int:
    """Until SIGTERM or SIGINT, or until the worker fails; the exit code. The first signal drains, a second ends the
    process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    server = WorkerServer(config)
    await server.start()
    try:
        if config.metrics_port is not None:
            _serve_metrics(server, config.metrics_port)
        ends = [asyncio.create_task(event.wait()) for event in (stop, server.failed)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        logger.info("stopping")
        await server.stop()
    return int(server.failed.is_set())


def _serve_metrics(server: WorkerServer, port: int) -> None:
    registry = CollectorRegistry()
    registry.register(StatsCollector(server))
    http, _ = start_http_server(port, addr=server.config.host, registry=registry)
    logger.info("metrics at http://%s:%d/metrics", server.config.host, http.server_port)


def main() -> int:
    try:
        configure_logging()
        return asyncio.run(serve(parse(sys.argv[1:])))
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
