"""`python -m blockyard.router`: one router without Ray.

SIGTERM lets running streams finish, then exits 0. A router that cannot start, or that fails, exits 1. SIGUSR1 logs how
late the event loop was since the last SIGUSR1, and how many tasks it has.
"""

import argparse
import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import get_args

from blockyard.proto.index.redis import check_urls
from blockyard.proto.metrics.prometheus import metrics_endpoint
from blockyard.proto.runtime.logs import LogConfig, LogFormat, LogLevel, configure_logging
from blockyard.proto.runtime.settings import add_arguments, given
from blockyard.proto.security.tls_files import server_tls, session_tls
from blockyard.router.config import RouterConfig
from blockyard.router.event_loop import new_event_loop
from blockyard.router.server import RouterServer

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "BLOCKYARD_CLUSTER_SECRET"
"""Environment variable of the cluster secret. It is no argument: every user of the machine can read arguments."""
REDIS_URL_VARIABLE = "BLOCKYARD_REDIS_URL"
GRACE_SECONDS = 600.0


def main() -> int:
    # transformers imports torch if it can. That takes seconds and 200 MB, and no tokenizer needs it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    arguments = _parser().parse_args()
    try:
        _configure_logging(arguments)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(_config(arguments), arguments))
    except StartError as error:
        print(f"blockyard.router: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m blockyard.router", description=__doc__)
    add_arguments(parser, RouterConfig)
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template that replaces the tokenizer's own."
    )
    parser.add_argument(
        "--redis-url",
        help="Redis of the prefix index, or several with commas between, in the same order for workers and routers. "
        "Default: BLOCKYARD_REDIS_URL, for a URL with a password. Without Redis placement follows load and hashing.",
    )
    parser.add_argument("--tls-cert", metavar="PEM", help="Serve clients over TLS with this certificate.")
    parser.add_argument("--tls-key", metavar="PEM", help="Key of --tls-cert.")
    parser.add_argument("--tls-client-ca", metavar="PEM", help="Clients must show a certificate of this CA.")
    parser.add_argument(
        "--session-tls-cert", metavar="PEM", help="Certificate for workers. All routers have the same one."
    )
    parser.add_argument("--session-tls-key", metavar="PEM", help="Key of --session-tls-cert.")
    parser.add_argument("--session-tls-ca", metavar="PEM", help="CA of the workers' certificates.")
    parser.add_argument(
        "--router-id", default="router-0", help="Name of the router in metrics and JSON logs."
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=-1,
        help="Prometheus endpoint, open to everyone who reaches it. 0 takes a free port, -1 (the default) opens none.",
    )
    parser.add_argument(
        "--log-level", choices=get_args(LogLevel), help="Default: BLOCKYARD_LOG_LEVEL, or info."
    )
    parser.add_argument(
        "--log-format", choices=get_args(LogFormat), help="Default: BLOCKYARD_LOG_FORMAT, or text."
    )
    parser.add_argument(
        "--grace-seconds", type=float, default=GRACE_SECONDS, help="Time at SIGTERM for streams to finish."
    )
    return parser


def _configure_logging(arguments: argparse.Namespace) -> None:
    log = arguments.log_level, arguments.log_format
    try:
        configure_logging(LogConfig.from_environment(*log), router_id=arguments.router_id)
    except ValueError as error:
        raise StartError(str(error)) from None


def _config(arguments: argparse.Namespace) -> RouterConfig:
    try:
        return _checked_config(arguments)
    except ValueError as error:
        raise StartError(str(error)) from None


def _redis_url(given: str | None) -> str | None:
    """Return the URL of Redis from the argument or the environment, or None.

    Raises ValueError for a password in an argument, which every user of the machine can read.
    """
    if given is not None and ("@" in given or "password" in given.lower()):
        raise ValueError(
            f"--redis-url names a user or a password: set {REDIS_URL_VARIABLE} instead of an argument"
        )
    url = given or os.environ.get(REDIS_URL_VARIABLE)
    if url is not None:
        check_urls(url)
    return url


def _checked_config(arguments: argparse.Namespace) -> RouterConfig:
    if not 0 <= arguments.grace_seconds < math.inf:
        raise ValueError(f"--grace-seconds must be finite and not negative, not {arguments.grace_seconds:g}")
    return RouterConfig(
        chat_template=_chat_template(arguments.chat_template),
        cluster_secret=os.environ.get(SECRET_VARIABLE, ""),
        tls=server_tls(arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca),
        session_tls=session_tls(
            arguments.session_tls_cert, arguments.session_tls_key, arguments.session_tls_ca
        ),
        redis_url=_redis_url(arguments.redis_url),
        **given(RouterConfig, arguments),
    )


def _chat_template(file: str | None) -> str | None:
    try:
        return None if file is None else Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template {file!r} cannot be read: {type(error).__name__}") from None


class StartError(Exception):
    """The router cannot start; the message is for its operator."""


async def _serve(config: RouterConfig, arguments: argparse.Namespace) -> int:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server = RouterServer(config, owns_process=True, router_id=arguments.router_id)
    with _metrics(server, config.host, arguments):
        try:
            await server.start()
        except (OSError, ValueError, RuntimeError) as error:
            raise StartError(str(error)) from None
        loop.add_signal_handler(signal.SIGUSR1, _tell_of_loop, server)
        await _first_of(ended, server.failed)
        await server.stop(arguments.grace_seconds)
    return 1 if server.failed.is_set() else 0


def _tell_of_loop(server: RouterServer) -> None:
    logger.info("event loop: %s; %d tasks", server.loop_watch.take(), len(asyncio.all_tasks()))


@contextmanager
def _metrics(server: RouterServer, host: str, arguments: argparse.Namespace) -> Iterator[None]:
    port = arguments.metrics_port
    if port < 0:
        yield
        return
    with ExitStack() as stack:
        try:
            endpoint = metrics_endpoint(host, port, server.metric_source, lambda: server.model_readings)
            logger.info("metrics at %s", stack.enter_context(endpoint))
        except (OSError, ValueError) as error:
            raise StartError(f"--metrics-port {port}: {error}") from None
        yield


async def _first_of(*events: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


if __name__ == "__main__":
    sys.exit(main())
