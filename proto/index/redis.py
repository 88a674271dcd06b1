"""The prefix index in Redis: each operation calls a script, which Redis runs atomically.

Owns the connection's settings, the script calls, and the mapping of Redis's errors to PrefixIndexError. Does not own
the layout (schema.py). The publisher and the router own retries, time-outs of placement, and when to renew.
"""

import hashlib
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast
from urllib.parse import urlsplit

from blockyard.proto.index import schema as index_schema
from blockyard.proto.index import scripts as index_scripts
from blockyard.proto.index.contract import (
    MAX_BERTHS,
    MAX_LISTED,
    MAX_PAGE_RECORDS,
    ApplyResult,
    Batch,
    Berth,
    DirectoryPage,
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
)
from blockyard.proto.index.holders import Holders, Roster
from blockyard.proto.index.redis_parser import BoundedParser
from blockyard.proto.index.redis_sentinel import is_sentinel_url, sentinel_client
from blockyard.proto.index.shards import MAX_SHARDS, split_urls
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

MAX_RECORD_CHARACTERS = 256
MAX_FIELD_BYTES = 4 * MAX_RECORD_CHARACTERS
MAX_IDENTITY_BYTES = 2 * MAX_FIELD_BYTES
MAX_PAGE_BYTES = 1 << 18
MAX_PAGES = 2 * MAX_LISTED // MAX_PAGE_RECORDS
"""Most pages that `directory` reads. A replaced server could send empty pages without end."""
MAX_BLOCK_SIZE_DIGITS = 9
MAX_ERROR_CHARACTERS = 300
_ADDRESS = re.compile(r"\S+:[0-9]{1,5}")
_DATABASE = re.compile(r"(/[0-9]*)?")


def check_url(url: str) -> None:
    """Raise ValueError for a text that is no Redis URL. The error quotes none of it, because it may hold a password."""
    is_sentinel = is_sentinel_url(url)
    try:
        parts = urlsplit(url)
        is_known = is_sentinel or (
            parts.scheme in ("redis", "rediss", "unix")
            and bool(parts.hostname or parts.scheme == "unix")
            and bool(parts.scheme == "unix" or _DATABASE.fullmatch(parts.path))
        )
        pool: Any = (sentinel_client(url) if is_sentinel else Redis.from_url(url)).connection_pool
        pool.make_connection()  # connects nowhere yet
    except (ValueError, TypeError):
        is_known = False
    if not is_known:
        raise ValueError(
            "this is no Redis URL, such as redis://USER:PASSWORD@HOST:6379/0, rediss://HOST or "
            "redis+sentinel://USER:PASSWORD@HOST:26379,HOST:26379/SERVICE, and no list of them with commas between"
        ) from None


def check_urls(setting: str) -> None:
    """Raise ValueError for a text that is no Redis URL and no list of them. The error quotes none of it."""
    urls = split_urls(setting)
    if len(urls) > MAX_SHARDS:
        raise ValueError(f"{len(urls)} Redis servers are too many: {MAX_SHARDS} is the most")
    for url in urls:
        check_url(url)


def connect(url: str, *, timeout_seconds: float, has_deadlines: bool = False) -> Redis:
    """Return a client whose connections and replies fail after the time-out. Raises ValueError for a bad URL.

    `has_deadlines`: the caller bounds each call by a deadline of its own. So replies need no time-out, for which
    redis-py starts a task and two timers. Clients of Sentinel keep it.

    redis-py's own retries would hang for over 10 s on a stopped server, so they are off: the caller decides when to
    retry.
    """
    check_url(url)
    options: dict[str, Any] = {
        "parser_class": BoundedParser,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
    }
    if is_sentinel_url(url):
        return sentinel_client(url, **options)
    if has_deadlines:
        options["socket_timeout"] = None
    client: Redis = Redis.from_url(url, **options)
    return client


class RedisPrefixIndex:
    """PrefixIndex in Redis. Several may share one client. The caller closes the client.

    A reader may not load scripts. If Redis has lost them, a reader finds nothing until a worker has loaded all of them
    again. A worker notices at its next renewal.
    """

    def __init__(
        self,
        client: Redis,
        cluster: str,
        *,
        shard: int = 0,
        model: str = "",
        max_berths: int = MAX_BERTHS,
        is_reader: bool = False,
    ) -> None:
        """`model` names the index of a further model of the cluster. Empty: the cluster's own."""
        self._client = client
        self._prefix = index_schema.key_prefix(cluster, shard, model=model)
        self._max_berths = max_berths
        self._is_reader = is_reader
        self._roster = Roster()
        """The last roster that a look-up brought."""

    async def register(
        self, record: WorkerRecord, *, lease_seconds: float, has_host_cache: bool = False
    ) -> Berth:
        # Readers' scripts too: the scripts in Redis may be of another version.
        await self._load_scripts()
        epoch = secrets.randbits(63)
        reply = await self._call(
            index_scripts.REGISTER,
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
        with _checked_reply():
            number, anywhere = _counts(reply, 2)
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
        reply = await self._call(index_scripts.APPLY, *numbers, berth.epoch, batch.sequence, *packed)
        with _checked_reply():
            if reply == b"FULL":
                raise PrefixIndexError(ErrorKind.FULL, "Redis has reached its maxmemory")
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
            index_scripts.RENEW,
            berth.number,
            berth.epoch,
            _milliseconds(lease_seconds),
            applied_sequence,
            berth.anywhere or 0,
            *(_check_arguments(check) if check is not None else ()),
        )
        with _checked_reply():
            return RenewResult(reply.decode())

    async def retire(self, berth: Berth) -> None:
        await self._call(index_scripts.RETIRE, berth.number, berth.epoch, berth.anywhere or 0)

    async def claim(self, holder: str, *, lease_seconds: float) -> bool:
        """Claim the cluster's name for `lease_seconds`. Return False while another holder's claim runs."""
        reply = await self._call(index_scripts.CLAIM, holder, _milliseconds(lease_seconds))
        with _checked_reply():
            return _counts(reply, 1) == (1,)

    async def unclaim(self, holder: str) -> None:
        await self._call(index_scripts.UNCLAIM, holder)

    async def lookup(
        self, names: Sequence[bytes], *, most: int = MAX_LISTED, expects_workers: bool = False
    ) -> Sequence[Holder]:
        if not names:
            return []
        bounds = (most, MAX_IDENTITY_BYTES, index_schema.MAX_BISECTED_BLOCKS, index_schema.MAX_BISECTED_BYTES)
        reply = await self._call(
            index_scripts.LOOKUP,
            index_schema.pack_names(names),
            self._roster.token,
            *bounds,
            int(expects_workers),
            nothing=(b"", b"", b"", b"", self._roster.token),
        )
        with _checked_reply():
            token, *news = reply[4:]
            if news:
                self._roster = Roster.parse(token, *news, most_bytes=MAX_IDENTITY_BYTES)
            elif token != self._roster.token:
                # Nothing holds the chain: the script did not send the roster.
                return []
            return Holders.parse(reply, self._roster, most=most, most_blocks=len(names))

    async def directory(self) -> list[WorkerRecord]:
        records: list[WorkerRecord] = []
        after = 0
        for _ in range(MAX_PAGES):
            page = await self.directory_page(after)
            records += page.records
            after = page.next_after
            if after == 0 or len(records) >= MAX_LISTED:
                break
        return records[:MAX_LISTED]

    async def directory_page(self, after: int = 0) -> DirectoryPage:
        bounds = MAX_BERTHS, MAX_PAGE_RECORDS, MAX_FIELD_BYTES, MAX_PAGE_BYTES
        reply = await self._call(index_scripts.DIRECTORY, after, *bounds, nothing=(0, ()))
        with _checked_reply():
            (next_after,), found = _counts(reply[:1], 1), _at_most(MAX_PAGE_RECORDS, reply[1])
            if next_after and not after < next_after <= MAX_BERTHS:
                raise ValueError(next_after)
            records = [record for fields in found if (record := _parse_record(fields)) is not None]
        return DirectoryPage(records=records, next_after=next_after)

    async def purge(self, *, slice_buckets: int = 64) -> PurgeProgress:
        reply = await self._call(
            index_scripts.PURGE, slice_buckets, index_schema.PURGE_SLICE_ENTRIES, index_schema.NUM_BUCKETS
        )
        with _checked_reply():
            active, cursor, changed = _counts(reply[:3], 3)
            freed = tuple(int(number) for number in reply[3])
        return PurgeProgress(active=bool(active), next_bucket=cursor, changed_entries=changed, freed=freed)

    async def info(self) -> IndexInfo:
        names = sampled_names = sampled_bytes = live = dead = 0
        for first in range(0, index_schema.NUM_BUCKETS, index_schema.INFO_SLICE_BUCKETS):
            stop = min(first + index_schema.INFO_SLICE_BUCKETS, index_schema.NUM_BUCKETS)
            sample = index_schema.INFO_SAMPLE_EVERY
            reply = await self._call(index_scripts.INFO, first, stop, sample, nothing=(0, 0, 0, 0, 0))
            with _checked_reply():
                counts = _counts(reply, 5)
            names += counts[0]
            sampled_names += counts[1]
            sampled_bytes += counts[2]
            live, dead = counts[3:]
        bytes_a_name = sampled_bytes / sampled_names if sampled_names else 0.0
        return IndexInfo(names=names, bytes=round(bytes_a_name * names), live_berths=live, dead_berths=dead)

    async def _call(self, script: str, *arguments: str | int | bytes, nothing: Any = None) -> Any:
        """Call a script and return its reply. If Redis has lost the scripts, a reader gets `nothing`, and others load
        them and call again."""
        evalsha: Any = self._client.evalsha
        sent = _digest(script), 1, self._prefix, *arguments
        with _mapped_errors():
            try:
                return await evalsha(*sent)
            except exceptions.NoScriptError:
                if self._is_reader:
                    return nothing
            await self._load_scripts()
            return await evalsha(*sent)

    async def _load_scripts(self) -> None:
        """Load all scripts in one round trip, readers' scripts too."""
        with _mapped_errors():
            async with self._client.pipeline(transaction=False) as pipe:
                for script in index_scripts.ALL:
                    pipe.script_load(script)
                await pipe.execute()


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """Raise PrefixIndexError for any exception inside. The server may be no Redis, or under foreign control."""
    try:
        yield
    except PrefixIndexError:
        raise
    except Exception as error:
        raise PrefixIndexError(error_kind(error), _printable(error)) from error


@contextmanager
def _checked_reply() -> Iterator[None]:
    """Raise PrefixIndexError if parsing a reply inside fails, because none of our scripts gives such a reply."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        text = "Redis answers what none of our scripts does"
        raise PrefixIndexError(ErrorKind.REPLY, text) from error


def _counts(reply: Any, wanted: int) -> tuple[int, ...]:
    counts = tuple(reply)
    if len(counts) != wanted or not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise ValueError(wanted)
    return counts


def _at_most(bound: int, items: Sequence[Any]) -> Sequence[Any]:
    """Return the items, or raise ValueError if there are too many. They are not cut short: errors open the router's
    breaker, so that it reads no more such replies."""
    if len(items) > bound:
        raise ValueError(bound)
    return items


def _printable(error: Exception) -> str:
    """Return an error's text, cut short and without unprintable characters, because the server may have chosen it."""
    text = str(error)[:MAX_ERROR_CHARACTERS]
    return "".join(character if character.isprintable() else " " for character in text)


@cache
def _digest(script: str) -> str:
    """Return the SHA-1 by which Redis knows a loaded script."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


_NO_RIGHT = "The user executing the script can't"
"""The words by which Redis 6.2 refuses a script's command or key."""


_CLUSTER_MODE = ("CLUSTERDOWN", "CROSSSLOT", "hash to the same slot", "non local key")
"""Words by which a server in Cluster mode refuses a script's commands."""


def error_kind(error: Exception) -> ErrorKind:
    """Return the kind of an error. Errors inside a script arrive as text in a ResponseError, in another form in each
    version."""
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
        # From version 7 on Redis refuses such a script before it runs. redis-py then raises these classes, whose text
        # lacks the error code.
        case exceptions.OutOfMemoryError():
            return ErrorKind.FULL
        case exceptions.ReadOnlyError():
            return ErrorKind.READ_ONLY
        case exceptions.ConnectionError() | OSError():
            return ErrorKind.CONNECTION
        case _ if "OOM " in text or "'maxmemory'" in text:
            return ErrorKind.FULL
        case _ if text.startswith("NOLEASE "):
            return ErrorKind.NO_LEASE
        case _ if "READONLY" in text or "read only replica" in text:
            return ErrorKind.READ_ONLY
        case _ if any(word in text for word in ("NOPERM", "NOAUTH", "WRONGPASS", "permission", _NO_RIGHT)):
            return ErrorKind.DENIED
        case exceptions.ClusterError() | exceptions.AskError() | exceptions.ClusterCrossSlotError():
            return ErrorKind.CLUSTER_MODE
        case _ if any(words in text for words in _CLUSTER_MODE):
            return ErrorKind.CLUSTER_MODE
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


def _parse_record(fields: Sequence[bytes | None]) -> WorkerRecord | None:
    """Return the record, or None if our scripts cannot have written it."""
    *facts, proof = fields
    if any(fact is None for fact in facts):
        return None
    worker_id, incarnation, address, fingerprint, block_size = (
        cast(bytes, fact)[: MAX_FIELD_BYTES + 1].decode(errors="replace") for fact in facts
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
        proof=(proof or b"")[:MAX_RECORD_CHARACTERS].decode(errors="replace"),
    )
