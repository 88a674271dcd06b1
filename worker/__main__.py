"""`python -m blockyard.worker --model FOLDER`: one worker in this process, without Ray.

The cluster secret comes from BLOCKYARD_CLUSTER_SECRET, never from the command line, which every user of the machine
can read. SIGUSR1 logs how many tasks the event loop has, as it does in a router.
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
from blockyard.proto.metrics.readings import of_one_model
from blockyard.proto.runtime.garbage_collection import kept_out_of_garbage_collection
from blockyard.proto.runtime.logs import LogConfig, LogFormat, LogLevel, configure_logging
from blockyard.proto.runtime.settings import add_arguments, given
from blockyard.proto.security.tls_files import session_tls
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.metrics import worker_source
from blockyard.worker.startup.openmp import bound_spinning

if TYPE_CHECKING:
    from blockyard.worker.server import WorkerServer

logger = logging.getLogger("blockyard.worker")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def parse(arguments: list[str]) -> WorkerConfig:
    """Return the worker's settings, from the command line and the environment. Raises ValueError."""
    parser = argparse.ArgumentParser(prog="python -m blockyard.worker", description=__doc__)
    add_arguments(parser, EngineConfig)
    add_arguments(parser, WorkerConfig)
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="Prometheus endpoint. 0 takes a free port, -1 opens none."
    )
    parser.add_argument(
        "--session-tls-cert", metavar="PEM", help="Certificate for routers. All workers have the same one."
    )
    parser.add_argument("--session-tls-key", metavar="PEM", help="Key of --session-tls-cert.")
    parser.add_argument("--session-tls-ca", metavar="PEM", help="CA of the routers' certificates.")
    parser.add_argument(
        "--log-level", choices=get_args(LogLevel), help="Default: BLOCKYARD_LOG_LEVEL, or info."
    )
    parser.add_argument(
        "--log-format", choices=get_args(LogFormat), help="Default: BLOCKYARD_LOG_FORMAT, or text."
    )
    options = parser.parse_args(arguments)
    return WorkerConfig(
        engine=EngineConfig(**given(EngineConfig, options)),
        cluster_secret=os.environ.get("BLOCKYARD_CLUSTER_SECRET", ""),
        session_tls=session_tls(options.session_tls_cert, options.session_tls_key, options.session_tls_ca),
        redis_url=os.environ.get("BLOCKYARD_REDIS_URL"),
        metrics_port=None if options.metrics_port < 0 else options.metrics_port,
        log=LogConfig.from_environment(options.log_level, options.log_format),
        **given(WorkerConfig, options),
    )


async def serve(config: WorkerConfig) -> int:
    """Serve until SIGTERM or SIGINT, or until the worker fails, and return the exit code.

    The first signal drains the worker; a second signal ends the process at once.
    """
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
        with kept_out_of_garbage_collection(), _metrics(server):
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
    with metrics_endpoint(config.host, config.metrics_port, source, of_one_model(server.stats)) as url:
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
