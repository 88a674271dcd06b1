"""Node probe: asks a Ray node for its versions, code, files, Redis and ports before Blockyard runs there.

Ray sends this module to the node by value, because the node may have another copy of the package or none. So it imports
our code only inside calls that may fail, and it answers with plain values.
"""

import asyncio
import base64
import importlib.metadata
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

CONNECT_SECONDS = 3.0
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAYS_RECONNECT_SECONDS = 60.0
"""Ray's default of RECONNECT_VARIABLE."""


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
            "reconnect_seconds": reconnect_seconds(os.environ),
            "reconnect_seconds_of_all": _reconnect_seconds_of_all(os.getppid()),
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


def reconnect_seconds(environment: Mapping[str, str]) -> float:
    """Return how long Ray's processes with this environment outlive Ray's control service."""
    try:
        return float(environment[RECONNECT_VARIABLE])
    except (KeyError, ValueError):
        return RAYS_RECONNECT_SECONDS


def _reconnect_seconds_of_all(raylet: int) -> float | None:
    """Return what `ray start --system-config` says of it for all nodes, which precedes the variable.

    It is found on the head alone, beside the control service of this node's raylet. Elsewhere return None.
    """
    for entry in os.listdir("/proc"):
        program, options = _arguments(entry)
        if os.path.basename(program) == "gcs_server" and options.get("--session-name") == (
            _arguments(str(raylet))[1].get("--session-name")
        ):
            config = json.loads(base64.b64decode(options.get("--config_list") or "e30="))
            seconds = config.get(RECONNECT_VARIABLE.removeprefix("RAY_"))
            return None if seconds is None else float(seconds)
    return None


def _arguments(pid: str) -> tuple[str, dict[str, str]]:
    """Return a process's program, and its options with values. Empty if it has ended or is another user's."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            program, *options = file.read().split("\0")
    except OSError:
        return "", {}
    return program, dict(option.split("=", 1) for option in options if "=" in option)


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
