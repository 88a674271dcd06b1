"""A client of the primary Redis that Sentinel names: redis+sentinel://[USER:PASSWORD@]HOST[:PORT],.../SERVICE[/DB].

Owns the URL's form and the search for the primary. Does not own what is asked there (redis.py). The user and the
password are those of Redis. Those of Sentinel are the options sentinel_username and sentinel_password.
"""

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.exceptions import RedisError

SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""The schemes of Sentinel, and those of the servers that it names. `rediss+sentinel` stands for TLS with both."""
DEFAULT_PORT = 26379
_SERVICE_AND_DATABASE = re.compile(r"/([A-Za-z0-9._-]+)(?:/([0-9]*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelUrl:
    sentinels: tuple[tuple[str, int], ...]
    service: str
    is_tls: bool
    of_redis: dict[str, Any]
    """Options of the connections to Redis."""
    of_sentinel: dict[str, Any]


def is_sentinel_url(url: str) -> bool:
    return url.partition("://")[0] in SCHEMES


def parse_sentinel_url(url: str) -> SentinelUrl:
    """Raises ValueError for a text that is no such URL."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    found = _SERVICE_AND_DATABASE.fullmatch(parts.path)
    if found is None or parts.fragment:
        raise ValueError("there is no service in the URL")
    scheme = SCHEMES[parts.scheme]
    options: dict[str, Any] = dict(
        parse_url(urlunsplit((scheme, f"{login}{at}any", f"/{found[2] or 0}", parts.query, "")))
    )
    for name in ("host", "connection_class"):
        options.pop(name, None)
    of_sentinel = {name: value for name, value in options.items() if name.startswith("ssl_")}
    for name in ("username", "password"):
        if (value := options.pop(f"sentinel_{name}", None)) is not None:
            of_sentinel[name] = value
    return SentinelUrl(
        sentinels=tuple(_address(host) for host in hosts.split(",")),
        service=found[1],
        is_tls=scheme == "rediss",
        of_redis=options,
        of_sentinel=of_sentinel,
    )


def sentinel_client(url: str, **options: Any) -> Redis:
    """Return a client of the service's primary. `options` are those of all connections, to Sentinel too."""
    parsed = parse_sentinel_url(url)
    manager = _Sentinels([])  # type: ignore[no-untyped-call]
    manager.sentinels = [
        Redis.from_pool(
            ConnectionPool(
                connection_class=SSLConnection if parsed.is_tls else Connection,
                host=host,
                port=port,
                **{**options, **parsed.of_sentinel},
            )
        )
        for host, port in parsed.sentinels
    ]
    client: Redis = manager.master_for(
        parsed.service, redis_class=_PrimaryRedis, ssl=parsed.is_tls, **{**parsed.of_redis, **options}
    )
    return client


class _PrimaryRedis(Redis):
    """Closes the connections to Sentinel too."""

    async def aclose(self, *arguments: Any, **options: Any) -> None:
        await super().aclose(*arguments, **options)
        pool: Any = self.connection_pool
        await pool.sentinel_manager.aclose()


class _Sentinels(Sentinel):
    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Ask all Sentinels at once, and take the first that names a primary.

        redis-py asks one after another. One that hangs would take longer than a look-up has.
        """
        asked = [asyncio.ensure_future(self._primary(sentinel, service_name)) for sentinel in self.sentinels]
        try:
            for answer in asyncio.as_completed(asked):
                with contextlib.suppress(RedisError, OSError):
                    if (found := await answer) is not None:
                        return found
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise MasterNotFoundError("no Sentinel names a primary")

    async def _primary(self, sentinel: Redis, service: str) -> tuple[str, int] | None:
        asking: Any = sentinel
        state = (await asking.sentinel_masters()).get(service)
        if not state or not self.check_master_state(state, service):
            return None
        return state["ip"], state["port"]


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.netloc != text:
        raise ValueError("a Sentinel has no host")
    return parts.hostname, DEFAULT_PORT if parts.port is None else parts.port
