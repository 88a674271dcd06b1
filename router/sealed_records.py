"""Sealed records: texts of clients in Redis for some time, encrypted with the cluster secret, for all routers.

Owns a record's key and seal, its life, how much a router keeps, and what happens while Redis is away. The same seal is
on texts that clients keep themselves (TextSeal). Does not own what is in a record. A router may only append and
expire: these commands change no key of the prefix index, which has no strings. So a router that was taken over cannot
harm the index (proto/index/acl.py).
"""

import asyncio
import base64
import hmac
import logging
import os
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from blockyard.proto.index.contract import ErrorKind
from blockyard.proto.index.redis import error_kind
from blockyard.proto.index.schema import key_prefix
from blockyard.proto.index.shards import shard_of
from blockyard.proto.security.cluster_identity import records_key
from blockyard.router.dispatch.prefix_lookup import CircuitBreaker, PrefixLookupConfig, patient_timeout
from blockyard.router.errors import StoreUnavailable
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis.asyncio import Redis

KEEP_SECONDS = 24 * 3600
"""Time for which a record is kept."""
MAX_RECORD_BYTES = 1024 * 1024
"""A larger record is not kept. A reply of Redis may have twice as much (proto/index/redis_parser.py)."""
MAX_KEPT_BYTES = 256 * 1024 * 1024
"""Bytes that one router keeps. Beyond them it deletes its oldest records: the memory of Redis is the index's."""
TIMEOUT_SECONDS = 0.5
CALLS_AT_ONCE = 8
"""Calls of Redis at once, each of which has a connection."""
CALLS_OF_A_TENANT = 4
"""Calls at once for one tenant, so that others find a turn whatever it asks for."""
NONCE_BYTES = 12
_SEAL_BYTES = 32
_NAME_BYTES = 16
_TAG_BYTES = 16
_LENGTH = struct.Struct("<I")

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordName:
    kind: str
    tenant: str
    """Tenant to whom it belongs. Another one cannot name it."""
    record_id: str

    def encoded(self) -> bytes:
        return "\0".join((self.kind, self.tenant, self.record_id)).encode()


class KeptRecords:
    """Records that one router has written, the oldest first. Pure."""

    def __init__(self, max_bytes: int, keep_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._keep_seconds = keep_seconds
        self._written: deque[tuple[float, int, RecordName]] = deque()
        self.num_bytes = 0

    def add(self, name: RecordName, num_bytes: int, now: float) -> list[RecordName]:
        """Note a record, forget those that have expired, and return the oldest ones that must make room for it."""
        self._written.append((now, num_bytes, name))
        self.num_bytes += num_bytes
        surplus = []
        while self._written:
            written, size, oldest = self._written[0]
            is_expired = now - written >= self._keep_seconds
            if not is_expired and self.num_bytes <= self._max_bytes:
                break
            self._written.popleft()
            self.num_bytes -= size
            surplus += [] if is_expired else [oldest]
        return surplus


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is, and what seals it."""

    key: str
    shard: int
    """Number of the server that has it."""
    _seal: AESGCM

    @classmethod
    def of(cls, name: bytes, *, secret: bytes, prefix: str, num_shards: int) -> "Place":
        """Return the place of a record. Key and seal are derived from the secret and the record's name."""
        derived = hmac.digest(secret, name, "sha512")
        named = derived[_SEAL_BYTES : _SEAL_BYTES + _NAME_BYTES]
        return cls(prefix + named.hex(), shard_of(named, num_shards), AESGCM(derived[:_SEAL_BYTES]))

    def sealed(self, value: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._seal.encrypt(nonce, value, None)

    def opened(self, sealed: bytes) -> bytes | None:
        """Return what was sealed for this place, or None if this cluster has not sealed it."""
        try:
            return self._seal.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None)
        except (InvalidTag, ValueError):
            return None

    def entry(self, value: bytes) -> bytes:
        """Return a value sealed for this place, to be appended to others."""
        sealed = self.sealed(value)
        return _LENGTH.pack(len(sealed)) + sealed

    @staticmethod
    def entry_bytes(value: bytes) -> int:
        """Return the length of a value's entry."""
        return _LENGTH.size + NONCE_BYTES + len(value) + _TAG_BYTES

    def entries(self, record: bytes) -> Iterator[bytes]:
        """Yield the values of a record of entries, up to the first that this cluster has not sealed for this place."""
        at = 0
        while at + _LENGTH.size + NONCE_BYTES <= len(record):
            start = at + _LENGTH.size
            end = start + _LENGTH.unpack_from(record, at)[0]
            if end > len(record):
                return
            value = self.opened(record[start:end])
            if value is None:
                return
            yield value
            at = end


@dataclass(frozen=True, slots=True)
class TextSeal:
    """Seals texts that one tenant's clients keep and send back. Each router of the cluster opens them."""

    _place: Place

    @classmethod
    def of(cls, tenant: str, *, kind: str, cluster: str, secret: str) -> "TextSeal":
        name = RecordName(kind=kind, tenant=tenant, record_id="")
        return cls(Place.of(name.encoded(), secret=records_key(secret, cluster), prefix="", num_shards=1))

    def sealed(self, text: str) -> str:
        return base64.b64encode(self._place.sealed(text.encode())).decode()

    def opened(self, sealed: str) -> str | None:
        """Return the text, or None if this cluster has not sealed it for the tenant."""
        try:
            raw = base64.b64decode(sealed)
        except ValueError:
            return None
        # Several texts of base64 stand for the same bytes, and unknown characters are skipped: only ours is genuine.
        is_ours = base64.b64encode(raw).decode() == sealed
        value = self._place.opened(raw) if is_ours else None
        return None if value is None else value.decode()


class SealedRecords:
    """Records of one cluster, on the servers of its index."""

    def __init__(
        self,
        clients: Sequence[Redis],
        *,
        cluster: str,
        secret: str,
        kept: KeptRecords | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clients`: one for each server of the index. The hash of a record's name chooses one."""
        config = PrefixLookupConfig()
        self._clients = clients
        self._breakers = [
            CircuitBreaker(failures_to_open=config.failures_to_open, open_seconds=config.open_seconds)
            for _ in clients
        ]
        self._prefix = f"{key_prefix(cluster)}records:"
        self._secret = records_key(secret, cluster)
        self._kept = kept or KeptRecords(MAX_KEPT_BYTES, KEEP_SECONDS)
        self._clock = clock
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Turns of each tenant that has or awaits one."""
        self._has_warned = False

    async def put(self, name: RecordName, value: bytes) -> bool:
        """Keep a new record, and return whether it is kept. Never raises."""
        place = self._place(name)
        sealed = place.sealed(value)
        if len(sealed) > MAX_RECORD_BYTES:
            return False

        async def write() -> bool:
            async with self._clients[place.shard].pipeline(transaction=False) as pipe:
                # The expiry comes first, and with it only an empty reply.
                pipe.append(place.key, b"")
                pipe.getex(place.key, ex=KEEP_SECONDS)
                pipe.append(place.key, sealed)
                replies: list[Any] = await pipe.execute()
            return bool(replies[-1] == len(sealed))

        try:
            is_kept = await self._call(place, write, name.tenant)
            surplus = self._kept.add(name, len(sealed), self._clock()) if is_kept else []
            await self._delete_all(surplus, name.tenant)
        except StoreUnavailable:
            return False
        return is_kept

    async def get(self, name: RecordName) -> bytes | None:
        """Return a record, or None if there is none. Raises StoreUnavailable."""
        place = self._place(name)
        read = partial(self._clients[place.shard].getex, place.key)
        sealed = await self._call(place, read, name.tenant)
        return place.opened(sealed) if isinstance(sealed, bytes) else None

    async def delete(self, name: RecordName) -> None:
        """Delete a record, if there is one. Raises StoreUnavailable."""
        await self._delete_all([name], name.tenant)

    async def _delete_all(self, names: Sequence[RecordName], tenant: str) -> None:
        """Delete records for a call of a tenant, at once on each server that has some. Raises StoreUnavailable."""
        at_shard: dict[int, list[Place]] = {}
        for name in names:
            place = self._place(name)
            at_shard.setdefault(place.shard, []).append(place)
        for shard, places in at_shard.items():
            async with self._clients[shard].pipeline(transaction=False) as pipe:
                for place in places:
                    # A time that has passed deletes at once.
                    pipe.getex(place.key, exat=1)
                await self._call(places[0], pipe.execute, tenant)

    def _place(self, name: RecordName) -> Place:
        return Place.of(
            name.encoded(), secret=self._secret, prefix=self._prefix, num_shards=len(self._clients)
        )

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        own = self._turns_of.get(tenant)
        if own is None:
            own = self._turns_of[tenant] = asyncio.Semaphore(CALLS_OF_A_TENANT)
        async with own, self._turns:
            yield

    async def _call(self, place: Place, call: Callable[[], Awaitable[T]], tenant: str) -> T:
        # Waiting for a turn says nothing about Redis, so no timeout counts it.
        async with self._turn(tenant):
            return await self._asked(place, call)

    async def _asked(self, place: Place, call: Callable[[], Awaitable[T]]) -> T:
        breaker = self._breakers[place.shard]
        if not breaker.admits(self._clock()):
            raise StoreUnavailable("Redis, which keeps responses, does not answer")
        try:
            async with patient_timeout(TIMEOUT_SECONDS):
                reply = await call()
        except asyncio.CancelledError:
            breaker.abandoned()
            raise
        except Exception as error:  # the server may be no Redis, or under foreign control
            breaker.failed(self._clock())
            if error_kind(error) is ErrorKind.DENIED and not self._has_warned:
                self._has_warned = True
                logger.warning("Redis refuses APPEND or GETEX to this router: responses are not kept")
            raise StoreUnavailable("Redis, which keeps responses, does not answer") from None
        breaker.succeeded()
        return reply
