"""Node probe: asks a Ray node for its versions, code, files, Redis and ports before Blockyard runs there.

Ray sends this module to the node by value, because the node may have another copy of the package or none. So it imports
our code only inside calls that may fail, and it answers with plain values.
"""

import asyncio
import importlib.metadata
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

CONNECT_SECONDS = 3.0


class NodeProbe:
    """An actor that runs on a node while the questions are asked."""

    async def facts(
        self, packages: Sequence[str], model: str | None, redis_url: str | None
    ) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "packages": {name: _installed(name) for name in packages},
            "code": _code(),
            "has_bfloat16": _has_bfloat16(),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0) - os.getpriority(os.PRIO_PROCESS, os.getppid()),
            "model": None if model is None else _model(model),
            "redis": None if redis_url is None else await _redis(redis_url),
        }

    async def listen(self, host: str) -> int:
        """Listen on this node's address while this actor lives. Return the port."""
        self._listener = await asyncio.start_server(lambda reader, writer: writer.close(), host, 0)
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def unreachable(self, others: Sequence[tuple[str, str, int]]) -> list[str]:
        """Return the names of those nodes that cannot be reached from here. `others` is (name, host, port) of each."""
        return [name for name, host, port in others if not await _reaches(host, port)]


async def _reaches(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _code() -> str | None:
    """Return the code version. None if the package is missing or too old to report it."""
    try:
        from blockyard.proto.naming.code_version import code_version

        return code_version()
    except Exception:  # That copy of the package may fail in any way.
        return None


def _has_bfloat16() -> bool:
    """Tell whether a worker on this node's CPU chooses bfloat16 by default."""
    try:
        from blockyard.worker.model.data_type import cpu_has_bfloat16

        return cpu_has_bfloat16()
    except Exception:
        return False


def _model(folder: str) -> str:
    """Return what is wrong with the model's files. Empty if nothing is."""
    if not os.path.isdir(folder):
        return "the folder is not there"
    names = ["config.json", *(name for name in os.listdir(folder) if name.endswith(".safetensors"))]
    unreadable = [name for name in names if not os.access(os.path.join(folder, name), os.R_OK)]
    if unreadable:
        return f"cannot be read: {', '.join(sorted(unreadable))}"
    return "" if len(names) > 1 else "there are no weights (*.safetensors)"


async def _redis(urls: str) -> str:
    """Return the type of the first error that a Redis server gives. Empty if all answer.

    The error's text is not returned, because it may quote the password.
    """
    try:
        from blockyard.proto.index.redis import connect
        from blockyard.proto.index.shards import split_urls

        for url in split_urls(urls):
            async with connect(url, timeout_seconds=CONNECT_SECONDS) as client:
                ping: Any = client.ping()
                await ping
    except Exception as error:
        return type(error).__name__
    return ""
