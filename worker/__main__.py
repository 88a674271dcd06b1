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

from blockyard.worker.config import WorkerConfig, add_engine_arguments, engine_config
from blockyard.worker.server import WorkerServer
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger("blockyard.worker")

COUNTERS = {"prompt_tokens", "generated_tokens", "cached_tokens", "preemptions", "swaps"}


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
    options = parser.parse_args(arguments)
    return WorkerConfig(
        engine=engine_config(options),
        worker_id=options.worker_id,
        cluster=options.cluster,
        cluster_secret=os.environ.get("BLOCKYARD_CLUSTER_SECRET", ""),
        host=options.host,
        advertise_host=options.advertise_host,
        port=options.port,
        redis_url=os.environ.get("BLOCKYARD_REDIS_URL"),
        metrics_port=None if options.metrics_port < 0 else options.metrics_port,
        pool_map_path=options.pool_map_path,
    )


async def serve(config: WorkerConfig) -> int:
    """Until SIGTERM or SIGINT, or until the worker fails; the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
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
        logger.info("stopping")
        await server.stop()
    return int(server.failed.is_set())


def _serve_metrics(server: WorkerServer, port: int) -> None:
    registry = CollectorRegistry()
    registry.register(StatsCollector(server))
    http, _ = start_http_server(port, addr=server.config.host, registry=registry)
    logger.info("metrics at http://%s:%d/metrics", server.config.host, http.server_port)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(serve(parse(sys.argv[1:])))
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
