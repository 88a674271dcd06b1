"""`python -m blockyard.worker --model FOLDER`: one worker in this process, without Ray.

The cluster secret comes from BLOCKYARD_CLUSTER_SECRET, never from the command line, where everybody could read it.
SIGUSR1 logs how many tasks the event loop has, as it does in a router.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_args

from blockyard.proto.metrics.prometheus import metrics_endpoint
from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.runtime.garbage_collection import spared_by_garbage_collection
from blockyard.proto.runtime.grace import DEFAULT_GRACE_SECONDS
from blockyard.proto.runtime.logs import LogConfig, LogFormat, LogLevel, configure_logging
from blockyard.proto.security.tls_files import session_tls
from blockyard.worker.config import (
    DEFAULT_LEASE_SECONDS,
    DEFAULT_MAX_WAITING,
    DEFAULT_STALL_SECONDS,
    WorkerConfig,
    add_engine_arguments,
    engine_config,
)
from blockyard.worker.metrics import worker_source
from blockyard.worker.startup.openmp import bound_spinning

if TYPE_CHECKING:
    from blockyard.worker.server import WorkerServer

logger = logging.getLogger("blockyard.worker")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
    parser.add_argument(
        "--metrics-names",
        choices=get_args(MetricNames),
        default="blockyard",
        help="`vllm` adds vLLM's names at that endpoint; default: %(default)s",
    )
    parser.add_argument(
        "--model-name",
        default="",
        help="the model's id for clients, as metrics label it; default: the router's",
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
    parser.add_argument(
        "--log-level", choices=get_args(LogLevel), help="default: BLOCKYARD_LOG_LEVEL, or info"
    )
    parser.add_argument(
        "--log-format", choices=get_args(LogFormat), help="default: BLOCKYARD_LOG_FORMAT, or text"
    )
    parser.add_argument(
        "--lease-seconds",
        type=float,
        default=DEFAULT_LEASE_SECONDS,
        help="how long the prefix index believes it alive without a word; default: %(default)s",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=DEFAULT_MAX_WAITING,
        help="requests that wait inside; routers keep the others; default: %(default)s",
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
        metrics_names=options.metrics_names,
        model_name=options.model_name,
        pool_map_path=options.pool_map_path,
        grace_seconds=options.grace_seconds,
        stall_seconds=options.stall_seconds,
        lease_seconds=options.lease_seconds,
        max_waiting=options.max_waiting,
        log=LogConfig.from_environment(options.log_level, options.log_format),
    )


async def serve(config: WorkerConfig) -> int:
    """Until SIGTERM or SIGINT, or until the worker fails; the exit code. The first signal drains, a second ends the
    process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    bound_spinning()
    from blockyard.worker.server import WorkerServer

    server = WorkerServer(config)
    configure_logging(config.log, worker_id=config.worker_id, incarnation=server.incarnation)
    await server.start()
    loop.add_signal_handler(signal.SIGUSR1, _tell_of_loop)
    try:
        with spared_by_garbage_collection(), _metrics(server):
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


def _tell_of_loop() -> None:
    logger.info("event loop: %d tasks", len(asyncio.all_tasks()))


@contextmanager
def _metrics(server: "WorkerServer") -> Iterator[None]:
    config = server.config
    if config.metrics_port is None:
        yield
        return
    source = worker_source(config)
    with metrics_endpoint(config.host, config.metrics_port, source, server.stats) as url:
        logger.info("metrics at %s", url)
        yield


def main() -> int:
    try:
        return asyncio.run(serve(parse(sys.argv[1:])))
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
