"""`python -m blockyard.router`: one router without Ray. SIGTERM lets running streams finish, then exits 0; a router
that cannot start or fails exits 1."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from typing import get_args

from blockyard.router.config import (
    DEFAULT_MAX_BEAM_WIDTH,
    DEFAULT_MAX_OUTPUTS,
    RouterConfig,
)
from blockyard.router.placement_config import PolicyName
from blockyard.router.server import RouterServer

SECRET_VARIABLE = "BLOCKYARD_CLUSTER_SECRET"
"""The secret comes by environment: arguments can be read by anybody on the machine."""
REDIS_URL_VARIABLE = "BLOCKYARD_REDIS_URL"
GRACE_SECONDS = 600.0


def main() -> int:
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(_serve(_config(arguments), arguments.grace_seconds))
    except StartError as error:
        print(f"blockyard.router: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m blockyard.router", description=__doc__)
    parser.add_argument("--model", required=True, help="local folder or hub name; weights are not read")
    parser.add_argument("--model-name", help="what clients call the model (default: the folder's name)")
    parser.add_argument("--worker", action="append", default=[], metavar="HOST:PORT", help="may be repeated")
    parser.add_argument(
        "--redis-url",
        default=os.environ.get(REDIS_URL_VARIABLE),
        help="the prefix index (default: BLOCKYARD_REDIS_URL); without it placement goes by load and hashing",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one and logs it")
    parser.add_argument("--policy", choices=get_args(PolicyName), default="prefix")
    parser.add_argument("--max-outputs", type=int, default=DEFAULT_MAX_OUTPUTS, help="of one request")
    parser.add_argument("--max-beam-width", type=int, default=DEFAULT_MAX_BEAM_WIDTH)
    parser.add_argument("--cluster", default="default")
    parser.add_argument("--grace-seconds", type=float, default=GRACE_SECONDS, help="for streams at SIGTERM")
    return parser


def _config(arguments: argparse.Namespace) -> RouterConfig:
    try:
        return _checked_config(arguments)
    except ValueError as error:
        raise StartError(str(error)) from None


def _checked_config(arguments: argparse.Namespace) -> RouterConfig:
    return RouterConfig(
        model=arguments.model,
        model_name=arguments.model_name,
        cluster=arguments.cluster,
        cluster_secret=os.environ.get(SECRET_VARIABLE, ""),
        host=arguments.host,
        port=arguments.port,
        redis_url=arguments.redis_url,
        workers=tuple(arguments.worker),
        policy=arguments.policy,
        max_outputs=arguments.max_outputs,
        max_beam_width=arguments.max_beam_width,
    )


class StartError(Exception):
    """Why the router does not come up, for its operator."""


async def _serve(config: RouterConfig, grace_seconds: float) -> int:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server = RouterServer(config)
    try:
        await server.start()
    except (OSError, ValueError, RuntimeError) as error:
        raise StartError(str(error)) from None
    await _first_of(ended, server.failed)
    await server.stop(grace_seconds)
    return 1 if server.failed.is_set() else 0


async def _first_of(*events: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


if __name__ == "__main__":
    sys.exit(main())
