"""Gateway: the port of OpenAI's API, with its socket, TLS and lifetime, in the router's process and event loop.

Owns the bounds of connections whose client does not read or has vanished. Does not own requests (routes.py).
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp.web import ServerRunner
from blockyard.proto.security.tls import https_context
from blockyard.router.calls.gate import CallGate
from blockyard.router.calls.generating import Calls
from blockyard.router.calls.intake import Intake
from blockyard.router.config import RouterConfig
from blockyard.router.openai.about import AboutRouter
from blockyard.router.openai.batches.runner import Runner
from blockyard.router.openai.http.protocol import Connections
from blockyard.router.openai.routes import Routes
from blockyard.router.services.options import HANDSHAKE_SECONDS, max_connections

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""Time for requests that outlive the grace period to receive their error."""
BACKLOG = 1024
ACCEPTS_PER_TICK = 4
"""Connections accepted in one tick of the event loop. A burst of 256, accepted at once, blocks the loop for 20 ms."""
SEND_BUFFER_BYTES = 256 * 1024
"""Send buffer per connection in the kernel. By default megabytes would wait there for a client that does not read."""
VANISHED_SECONDS = 15
"""A client that acknowledges nothing for this long counts as gone, as with gRPC's pings."""


@asynccontextmanager
async def gateway(
    calls: Calls, gate: CallGate, intake: Intake, config: RouterConfig, about: AboutRouter
) -> AsyncIterator[tuple[str, Runner | None]]:
    """Serve for the life of the context. Yield "host:port" and what runs batches: "" if the config wants no gateway.

    Raises RuntimeError for a port that cannot be bound, and ValueError for TLS files that cannot be used.
    """
    if config.http_port is None:
        yield "", None
        return
    tls = https_context(config.tls)
    listener = _listener(config.host, config.http_port, shares_port=config.reuse_port)
    batch_dir = None if config.batch_dir is None else Path(config.batch_dir)
    routes = Routes(calls, gate, intake, about, config.cors_origins, batch_dir)
    connections = Connections(routes, most_connections=max_connections())
    runner = ServerRunner(connections, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    listening = await asyncio.get_running_loop().create_server(
        connections,
        sock=listener,
        ssl=tls,
        backlog=ACCEPTS_PER_TICK,
        ssl_handshake_timeout=HANDSHAKE_SECONDS if tls else None,
    )
    # asyncio's one argument bounds both what it accepts in a tick and what the kernel holds for it.
    listener.listen(BACKLOG)
    try:
        address = f"{config.host}:{listener.getsockname()[1]}"
        logger.info("OpenAI's API is served on %s://%s/v1", "http" if tls is None else "https", address)
        yield address, None if routes.batches is None else routes.batches.runner
    finally:
        listening.close()
        await runner.cleanup()


def _listener(host: str, port: int, *, shares_port: bool) -> socket.socket:
    """Return a socket bound to the port. Accepted connections inherit its options. An IPv6 `host` is in brackets, as in
    gRPC."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
        (socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares_port)),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, VANISHED_SECONDS - 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_SECONDS * 1000),
    ):
        listener.setsockopt(level, option, value)
    try:
        listener.bind((host.removeprefix("[").removesuffix("]"), port))
    except OSError:
        listener.close()
        raise RuntimeError(f"cannot listen on {host}:{port} for HTTP: is the port taken?") from None
    return listener
