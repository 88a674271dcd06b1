"""The prefix index in Redis: one script call for each operation.

Owns the connection's settings, the calling of the scripts and the mapping of Redis's errors to
PrefixIndexError. Does not own the layout (index_schema.py), retries, time-outs of the placement path, or when
to renew: the publisher and the router decide those.
"""

import logging
import re
import secrets
from collections.abc import Awaitable, Sequence
from typing import Any, cast

from blockyard.proto import index_schema, index_scripts, index_walks
from blockyard.proto.prefix_index import (
    MAX_BERTHS,
    ApplyResult,
    Batch,
    Berth,
    Depths,
    ErrorKind,
    Holder,
    Incarnation,
    IndexInfo,
    PrefixIndexError,
    PurgeProgress,
    RenewResult,
    SpotCheck,
    WorkerId,
    WorkerRecord,
    merge_tiers,
)
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

logger = logging.getLogger(__name__)

MAX_RECORD_CHARACTERS = 256
MAX_FIELD_BYTES = 4 * MAX_RECORD_CHARACTERS
MAX_IDENTITY_BYTES = 2 * MAX_FIELD_BYTES
MAX_LISTED = 4096
"""Records in a directory, and holders of a block in a look-up. What is beyond is left out: whoever writes more is not a
cluster of ours, and may not make a router read megabytes."""
MAX_BLOCK_SIZE_DIGITS = 9
_ADDRESS = re.compile(r"\S+:[0-9]{1,5}")
_COMPACT_BUCKETS = {
    "entries": index_schema.MAX_BUCKET_ENTRIES,
    "value": index_schema.MAX_BUCKET_VALUE_BYTES,
}


def connect(url: str, *, timeout_seconds: float) -> Redis:
    """A client that answers or fails within the time-out. redis-py's own retries would hang for over
    10 s on a stopped server, so there are none: whoever calls knows better when to come back."""
    client: Redis = Redis.from_url(
        url,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
    )
    return client


class RedisPrefixIndex:
    """PrefixIndex in Redis. Several may share one client; the caller closes the client."""

    def __init__(self, client: Redis, cluster: str, *, max_berths: int = MAX_BERTHS) -> None:
        self._client = client
        self._prefix = index_schema.key_prefix(cluster)
        self._max_berths = max_berths
        self._register = client.register_script(index_scripts.REGISTER)
        self._apply = client.register_script(index_scripts.APPLY)
        self._renew = client.register_script(index_scripts.RENEW)
        self._retire = client.register_script(index_scripts.RETIRE)
        self._lookup = client.register_script(index_scripts.LOOKUP)
        self._directory = client.register_script(index_scripts.DIRECTORY)
        self._purge = client.register_script(index_walks.PURGE)
        self._info = client.register_script(index_walks.INFO)
        self._has_warned = False

    async def register(
        self, record: WorkerRecord, *, lease_seconds: float, has_host_cache: bool = False
    ) -> Berth:
        await self._keep_buckets_compact()
        epoch = secrets.randbits(63)
        number, anywhere = await self._call(
            self._register,
            epoch,
            _milliseconds(lease_seconds),
            self._max_berths,
            record.worker_id,
            record.incarnation,
            record.address,
            record.fingerprint,
            record.block_size,
            int(has_host_cache),
            index_schema.ANYWHERE_SUFFIX,
            record.proof,
        )
        if number == 0:
            raise PrefixIndexError(
                ErrorKind.BERTHS_EXHAUSTED,
                f"all {self._max_berths} berths are taken, dead ones are not purged yet: "
                f"{record.worker_id} is not in the index",
            )
        return Berth(number=number, epoch=epoch, anywhere=anywhere or None)

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        names = (batch.removed, batch.anywhere_removed, batch.anywhere_added, batch.added)
        packed = map(index_schema.pack_names, names)
        numbers = (berth.number, berth.anywhere or 0)
        reply = await self._call(self._apply, *numbers, berth.epoch, batch.sequence, *packed)
        return ApplyResult(reply.decode())

    async def renew(
        self,
        berth: Berth,
        *,
        lease_seconds: float,
        applied_sequence: int = 0,
        check: SpotCheck | None = None,
    ) -> RenewResult:
        reply = await self._call(
            self._renew,
            berth.number,
            berth.epoch,
            _milliseconds(lease_seconds),
            applied_sequence,
            berth.anywhere or 0,
            *(_check_arguments(check) if check is not None else ()),
        )
        return RenewResult(reply.decode())

    async def retire(self, berth: Berth) -> None:
        await self._call(self._retire, berth.number, berth.epoch, berth.anywhere or 0)

    async def lookup(self, names: Sequence[bytes]) -> list[Holder]:
        if not names:
            return []
        packed = index_schema.pack_names(names)
        bounds = index_schema.MAX_BUCKET_ENTRIES, MAX_LISTED, MAX_IDENTITY_BYTES
        reply = await self._call(self._lookup, packed, *bounds)
        return _parse_holders(reply)

    async def directory(self) -> list[WorkerRecord]:
        reply = await self._call(self._directory, MAX_LISTED, MAX_FIELD_BYTES)
        return [record for fields in reply if (record := _parse_record(fields)) is not None]

    async def purge(self, *, slice_buckets: int = 64) -> PurgeProgress:
        active, cursor, changed, freed = await self._call(
            self._purge, slice_buckets, index_schema.PURGE_SLICE_ENTRIES, index_schema.NUM_BUCKETS
        )
        return PurgeProgress(
            active=bool(active),
            next_bucket=cursor,
            changed_entries=changed,
            freed=tuple(int(number) for number in freed),
        )

    async def info(self) -> IndexInfo:
        names = sampled_names = sampled_bytes = live = dead = 0
        for first in range(0, index_schema.NUM_BUCKETS, index_schema.INFO_SLICE_BUCKETS):
            stop = min(first + index_schema.INFO_SLICE_BUCKETS, index_schema.NUM_BUCKETS)
            counts = await self._call(self._info, first, stop, index_schema.INFO_SAMPLE_EVERY)
            names += counts[0]
            sampled_names += counts[1]
            sampled_bytes += counts[2]
            live, dead = counts[3:]
        bytes_a_name = sampled_bytes / sampled_names if sampled_names else 0.0
        return IndexInfo(names=names, bytes=round(bytes_a_name * names), live_berths=live, dead_berths=dead)

    async def _call(self, script: Any, *arguments: str | int | bytes) -> Any:
        try:
            return await script(keys=[self._prefix], args=arguments)
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            raise PrefixIndexError(error_kind(error), str(error)) from error

    async def _keep_buckets_compact(self) -> None:
        """Raises Redis's bounds for compact hashes if they are lower. They are lost when Redis restarts, so
        each registration looks again. A managed Redis may refuse: the index works and takes more memory."""
        try:
            for what, wanted in _COMPACT_BUCKETS.items():
                # The old name is the one that every version understands.
                name = f"hash-max-ziplist-{what}"
                current = await cast(Awaitable[dict[Any, Any]], self._client.config_get(name))
                if int(next(iter(current.values()), 0)) < wanted:
                    await cast(Awaitable[Any], self._client.config_set(name, wanted))
        except exceptions.ResponseError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "Redis keeps its own bounds for compact hashes, the index takes more memory: %s", error
                )
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            raise PrefixIndexError(error_kind(error), str(error)) from error


_NO_RIGHT = "The user executing the script can't"
"""How Redis 6.2 refuses a script's command or key."""


def error_kind(error: Exception) -> ErrorKind:
    """Errors raised inside a script arrive as text in a ResponseError, in another form in each version."""
    text = str(error)
    match error:
        case exceptions.TimeoutError() | TimeoutError():
            return ErrorKind.TIMEOUT
        case (
            exceptions.AuthenticationError()
            | exceptions.AuthorizationError()
            | exceptions.NoPermissionError()
        ):
            return ErrorKind.DENIED
        case exceptions.BusyLoadingError():
            return ErrorKind.LOADING
        case exceptions.ConnectionError() | OSError():
            return ErrorKind.CONNECTION
        case _ if "OOM " in text:
            return ErrorKind.FULL
        case _ if "READONLY" in text or "read only replica" in text:
            return ErrorKind.READ_ONLY
        case _ if any(word in text for word in ("NOPERM", "NOAUTH", "WRONGPASS", "permission", _NO_RIGHT)):
            return ErrorKind.DENIED
        case _ if "WRONGTYPE" in text:
            return ErrorKind.DAMAGED
    return ErrorKind.REPLY


def _milliseconds(seconds: float) -> int:
    if seconds <= 0:
        raise ValueError(f"a lease must be longer than 0 s, got {seconds}")
    return max(1, round(seconds * 1000))


def _check_arguments(check: SpotCheck) -> list[str | bytes]:
    names = (check.held, check.gone, check.anywhere_held, check.anywhere_gone)
    return [
        index_schema.identity(check.record.worker_id, check.record.incarnation),
        index_schema.ANYWHERE_SUFFIX,
        check.record.address,
        *map(index_schema.pack_names, names),
    ]


def _parse_holders(reply: Sequence[object]) -> list[Holder]:
    """Without what is not of our making."""
    on_gpu: Depths = {}
    anywhere: Depths = {}
    for identity, depth in zip(reply[::2], reply[1::2], strict=True):
        if not isinstance(identity, bytes) or not isinstance(depth, int):
            continue
        text = identity.decode(errors="replace")
        depths = anywhere if text.endswith(index_schema.ANYWHERE_SUFFIX) else on_gpu
        parts = text.removesuffix(index_schema.ANYWHERE_SUFFIX).split("\0")
        if len(parts) == 2:
            depths[WorkerId(parts[0]), Incarnation(parts[1])] = depth
    return merge_tiers(on_gpu, anywhere)


def _parse_record(fields: Sequence[bytes | None]) -> WorkerRecord | None:
    """None for what is not of our making."""
    *facts, proof = fields
    if any(fact is None for fact in facts):
        return None
    worker_id, incarnation, address, fingerprint, block_size = (
        cast(bytes, fact).decode(errors="replace") for fact in facts
    )
    texts = (worker_id, incarnation, address, fingerprint)
    if not all(text.isprintable() and len(text) <= MAX_RECORD_CHARACTERS for text in texts):
        return None
    if not (
        block_size.isdecimal() and len(block_size) <= MAX_BLOCK_SIZE_DIGITS and _ADDRESS.fullmatch(address)
    ):
        return None
    return WorkerRecord(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        address=address,
        fingerprint=fingerprint,
        block_size=int(block_size),
        proof=(proof or b"").decode(errors="replace"),
    )
