"""`python -m blockyard.router`: one router without Ray. SIGTERM lets running streams finish, then exits 0; a router
that cannot start or fails exits 1. SIGUSR1 logs how late the event loop was since the last one, and
how many tasks it has."""

import argparse
import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import get_args

from blockyard.proto.index.redis import check_url
from blockyard.proto.limits import MAX_PORT
from blockyard.proto.metrics.prometheus import metrics_endpoint
from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.runtime.logs import LogConfig, LogFormat, LogLevel, configure_logging
from blockyard.proto.security.tls_files import server_tls, session_tls
from blockyard.router.admission.fair_queue import parse_weights
from blockyard.router.config import (
    DEFAULT_MAX_BEAM_WIDTH,
    DEFAULT_MAX_OUTPUTS,
    DEFAULT_MAX_QUEUE_SECONDS,
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_TOKENS_ADMITTED,
    RouterConfig,
    checked_origins,
)
from blockyard.router.placement.config import PolicyName, parse_placement
from blockyard.router.server import RouterServer
from blockyard.router.tokenizing.model_facts import GenerationConfig

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "BLOCKYARD_CLUSTER_SECRET"
"""The secret comes by environment: arguments can be read by anybody on the machine."""
REDIS_URL_VARIABLE = "BLOCKYARD_REDIS_URL"
GRACE_SECONDS = 600.0
FAULT_SETTINGS = (
    "default_timeout_seconds",
    "no_worker_seconds",
    "slow_reader_seconds",
    "suspect_seconds",
    "lost_seconds",
    "stall_seconds",
    "max_migrations",
)
"""Of RouterConfig: what is borne, and for how long. Each is an option."""


def main() -> int:
    # transformers imports torch where it can; it takes seconds and 200 MB, and no tokenizer needs it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    arguments = _parser().parse_args()
    try:
        _configure_logging(arguments)
        return asyncio.run(_serve(_config(arguments), arguments))
    except StartError as error:
        print(f"blockyard.router: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m blockyard.router", description=__doc__)
    parser.add_argument("--model", required=True, help="local folder or hub name; weights are not read")
    parser.add_argument(
        "--model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="what clients call the model: its id, then aliases (default: the hub's name and its last part, or the "
        "folder's name)",
    )
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="take the tokenizer and chat template of this one"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja template, in place of the tokenizer's own"
    )
    parser.add_argument(
        "--generation-config",
        choices=get_args(GenerationConfig),
        default="auto",
        help="auto takes sampling defaults from the model's generation_config.json; none ignores them",
    )
    parser.add_argument("--worker", action="append", default=[], metavar="HOST:PORT", help="may be repeated")
    parser.add_argument(
        "--redis-url",
        help="the prefix index (default: BLOCKYARD_REDIS_URL, for one with a password); without it placement goes by "
        "load and hashing",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one and logs it")
    parser.add_argument(
        "--http-port",
        type=int,
        help="serve OpenAI's API here too; 0 takes a free one and logs it (default: do not)",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages from here, such as https://chat.example, may call --http-port; may be repeated",
    )
    parser.add_argument("--reuse-port", action="store_true", help="share the port with other routers")
    parser.add_argument(
        "--policy", choices=get_args(PolicyName), default="prefix", help="how a worker is chosen"
    )
    parser.add_argument(
        "--placement",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of placement (PlacementConfig), such as near_equal_ms=2; may be repeated",
    )
    parser.add_argument("--tokenizer-processes", type=int, default=1, help="prompts tokenised at once")
    parser.add_argument("--max-outputs", type=int, default=DEFAULT_MAX_OUTPUTS, help="of one request")
    parser.add_argument("--max-beam-width", type=int, default=DEFAULT_MAX_BEAM_WIDTH)
    parser.add_argument("--max-requests", type=int, default=DEFAULT_MAX_REQUESTS, help="held at once")
    parser.add_argument("--max-tokens-admitted", type=int, default=DEFAULT_MAX_TOKENS_ADMITTED)
    parser.add_argument("--max-queue-seconds", type=float, default=DEFAULT_MAX_QUEUE_SECONDS)
    parser.add_argument("--tenant-weight", action="append", default=[], metavar="NAME=WEIGHT")
    parser.add_argument("--loop-tick-seconds", type=float, default=0.005, help="of the event loop's watch")
    defaults = {setting.name: setting.default for setting in fields(RouterConfig)}
    for name in FAULT_SETTINGS:
        default = defaults[name]
        parser.add_argument(
            "--" + name.replace("_", "-"), type=type(default), default=default, help="default: %(default)s"
        )
    parser.add_argument(
        "--auth-file", metavar="FILE", help="tokens that clients must show (blockyard token new)"
    )
    parser.add_argument("--tls-cert", metavar="PEM", help="serve clients over TLS, with this certificate")
    parser.add_argument("--tls-key", metavar="PEM")
    parser.add_argument("--tls-client-ca", metavar="PEM", help="clients must show a certificate of this CA")
    parser.add_argument("--session-tls-cert", metavar="PEM", help="shown to workers, which all have the same")
    parser.add_argument("--session-tls-key", metavar="PEM")
    parser.add_argument("--session-tls-ca", metavar="PEM", help="of the workers' certificates")
    parser.add_argument("--router-id", default="router-0", help="what its metrics and JSON logs name it")
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=-1,
        help="Prometheus endpoint, for whoever reaches it; 0 takes a free port, -1 (the default) has none",
    )
    parser.add_argument(
        "--metrics-names",
        choices=get_args(MetricNames),
        default="blockyard",
        help="`vllm` adds vLLM's names there and at the gateway's /metrics; default: %(default)s",
    )
    parser.add_argument("--cluster", default="default")
    parser.add_argument(
        "--log-level", choices=get_args(LogLevel), help="default: BLOCKYARD_LOG_LEVEL, or info"
    )
    parser.add_argument(
        "--log-format", choices=get_args(LogFormat), help="default: BLOCKYARD_LOG_FORMAT, or text"
    )
    parser.add_argument("--grace-seconds", type=float, default=GRACE_SECONDS, help="for streams at SIGTERM")
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
    """Refuses a password in an argument, which every user of the machine can read."""
    if given is not None and ("@" in given or "password" in given.lower()):
        raise ValueError(
            f"--redis-url names a user or a password: set {REDIS_URL_VARIABLE} instead of an argument"
        )
    url = given or os.environ.get(REDIS_URL_VARIABLE)
    if url is not None:
        check_url(url)
    return url


def _checked_config(arguments: argparse.Namespace) -> RouterConfig:
    # The kernel would take the port's last 16 bits, and of the others no one would ever be told.
    for option, port in (("--port", arguments.port), ("--http-port", arguments.http_port or 0)):
        if not 0 <= port <= MAX_PORT:
            raise ValueError(f"{option} must be from 0 to {MAX_PORT}, not {port}")
    for address in arguments.worker:
        _check_address(address)
    if not 0 <= arguments.grace_seconds < math.inf:
        raise ValueError(f"--grace-seconds must be finite and not negative, not {arguments.grace_seconds:g}")
    return RouterConfig(
        model=arguments.model,
        model_names=tuple(arguments.model_name),
        tokenizer=arguments.tokenizer,
        chat_template=_chat_template(arguments.chat_template),
        generation_config=arguments.generation_config,
        cluster=arguments.cluster,
        cluster_secret=os.environ.get(SECRET_VARIABLE, ""),
        host=arguments.host,
        port=arguments.port,
        http_port=arguments.http_port,
        cors_origins=checked_origins(arguments.cors_origin),
        auth_file=arguments.auth_file,
        tls=server_tls(arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca),
        session_tls=session_tls(
            arguments.session_tls_cert, arguments.session_tls_key, arguments.session_tls_ca
        ),
        reuse_port=arguments.reuse_port,
        redis_url=_redis_url(arguments.redis_url),
        workers=tuple(arguments.worker),
        policy=arguments.policy,
        placement=parse_placement(arguments.placement),
        tokenizer_processes=arguments.tokenizer_processes,
        max_outputs=arguments.max_outputs,
        max_beam_width=arguments.max_beam_width,
        max_requests=arguments.max_requests,
        max_tokens_admitted=arguments.max_tokens_admitted,
        max_queue_seconds=arguments.max_queue_seconds,
        tenant_weights=parse_weights(arguments.tenant_weight),
        loop_tick_seconds=arguments.loop_tick_seconds,
        metrics_names=arguments.metrics_names,
        **{name: getattr(arguments, name) for name in FAULT_SETTINGS},
    )


def _chat_template(file: str | None) -> str | None:
    try:
        return None if file is None else Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template {file!r} cannot be read: {type(error).__name__}") from None


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 1 <= int(port) <= MAX_PORT
    if not host or not is_port:
        raise ValueError(f"--worker must be HOST:PORT, such as 127.0.0.1:50061, not {address!r}")


class StartError(Exception):
    """Why the router does not come up, for its operator."""


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
            endpoint = metrics_endpoint(host, port, server.metric_source, lambda: server.readings)
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
