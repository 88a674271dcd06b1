"""Adapter log: the changes of one model's adapters in Redis, sealed with the cluster secret, for all routers.

A router may only append and delete (proto/index/acl.py), so the log is a string of sealed changes. Once it is long, it
is taken out of Redis and written anew. A router that appends meanwhile loses nothing, because the order of changes does
not matter. Who writes to Redis can hide changes from later routers, but cannot invent an adapter. Does not own the
changes (registry.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from blockyard.proto.index.schema import key_prefix
from blockyard.proto.security.cluster_identity import adapters_key
from blockyard.router.adapters.registry import Change
from blockyard.router.config import ServedModel
from blockyard.router.errors import StoreUnavailable
from blockyard.router.sealed_records import KEEP_SECONDS, TIMEOUT_SECONDS, Place
from redis.asyncio import Redis

MAX_LOG_BYTES = 256 * 1024
"""A longer log is written anew. It holds about a thousand changes."""
_NAME = b"adapters"

T = TypeVar("T")


class AdapterLog:
    """Log of one model of a cluster, on one server of its index.

    A model that was removed and added again has another log than before, even if a router still writes to that one.
    The log of an added model ends with its cluster: it expires once no router has read it for KEEP_SECONDS.
    """

    def __init__(self, clients: Sequence[Redis], *, cluster: str, secret: str, model: ServedModel) -> None:
        self.model = model
        # Nothing for the model that the cluster began with, so that routers find the log of older versions.
        of_model = f"\0{model.index}\0{model.addition}".encode() if model.index or model.addition else b""
        self._place = Place.of(
            _NAME + of_model,
            secret=adapters_key(secret, cluster),
            prefix=f"{key_prefix(cluster, model=model.index)}adapters:",
            num_shards=len(clients),
        )
        self._client = clients[self._place.shard]
        self._expires_after = KEEP_SECONDS if model.addition else None

    async def read(self) -> bytes:
        """Return the log as it stands in Redis, empty if there is none. Raises StoreUnavailable."""
        record = await self._call(lambda: self._client.getex(self._place.key, ex=self._expires_after))
        return record if isinstance(record, bytes) else b""

    def changes(self, record: bytes) -> list[Change]:
        """Return the changes of a log, up to the first that this cluster has not sealed."""
        return [Change.unpacked(packed) for packed in self._place.entries(record)]

    def is_whole(self, record: bytes) -> bool:
        """Return False where a part of the log cannot be read. What is appended behind it would be lost."""
        entries = self._place.entries(record)
        return sum(self._place.entry_bytes(value) for value in entries) == len(record)

    async def take(self) -> bytes:
        """Return the log, and delete it in the same moment. Raises StoreUnavailable."""
        # A time that has passed deletes at once.
        record = await self._call(lambda: self._client.getex(self._place.key, exat=1))
        return record if isinstance(record, bytes) else b""

    async def append(self, changes: Sequence[Change]) -> None:
        """Append changes to the log. Raises StoreUnavailable."""
        entries = b"".join(self._place.entry(change.packed()) for change in changes)
        await self._call(lambda: self._client.append(self._place.key, entries))

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await call()
        except Exception:  # the server may be no Redis, or under foreign control
            raise StoreUnavailable("Redis, which keeps the adapters, does not answer") from None
