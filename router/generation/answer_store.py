"""Answer store: keeps the token ids of sessions' answers in Redis for some time, sealed with the cluster secret.

A later prompt of the session takes them in place of the answer's text (tokenizing/splices.py). Owns the record of a
session, and what happens while Redis is away: prompts are then encoded like any other, and no request fails. All
routers of a cluster share the records. Does not own what is spliced, or the seal (../sealed_records.py).

A record is a string of sealed answers, in order. Routers may only append to it and renew its expiry. These commands
change no key of the prefix index, so a router that was taken over cannot harm it (proto/index/acl.py).
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from blockyard.proto.index.contract import ErrorKind
from blockyard.proto.index.redis import error_kind
from blockyard.proto.index.schema import key_prefix
from blockyard.proto.security.cluster_identity import answers_key
from blockyard.router.dispatch.prefix_lookup import CircuitBreaker, PrefixLookupConfig, patient_timeout
from blockyard.router.sealed_records import Place
from redis.asyncio import Redis

MAX_RECORD_BYTES = 256 * 1024
"""A session whose record has this size keeps no more answers: about 64,000 tokens. The earliest ones stay, because the
blocks of all later ones build on theirs."""
REMEMBERED_FULL = 4096
"""Sessions with a full record that a router remembers, to append nothing without having read."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class AnswerStore:
    """Records of one cluster's sessions. No method raises an error of Redis."""

    def __init__(
        self,
        clients: Sequence[Redis],
        *,
        cluster: str,
        secret: str,
        keep_seconds: float,
        config: PrefixLookupConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clients`: one for each server of the index. A session's record is on one of them."""
        self._clients = clients
        self._prefix = f"{key_prefix(cluster)}answers:"
        self._secret = answers_key(secret, cluster)
        self._keep_seconds = max(1, round(keep_seconds))
        self._config = config or PrefixLookupConfig()
        self._clock = clock
        self._breakers = [
            CircuitBreaker(
                failures_to_open=self._config.failures_to_open, open_seconds=self._config.open_seconds
            )
            for _ in clients
        ]
        self._full: OrderedDict[str, None] = OrderedDict()
        """Keys of full records, the latest last."""
        self.errors: Counter[ErrorKind] = Counter()
        """Failed reads and writes, by kind."""
        self.num_skipped = 0
        """Reads and writes that the open breaker did not admit."""
        self.num_spliced_tokens = 0
        """Tokens of prompts that came from kept answers."""

    async def read(self, name: bytes) -> bytes:
        """Return a session's answers, packed (tokenizing/splices.py), and renew their expiry. Return nothing where
        there are none, or Redis does not answer in time."""
        session = self._session(name)
        client = self._clients[session.shard]
        record = await self._asked(session, lambda: client.getex(session.key, ex=self._keep_seconds))
        record = record if isinstance(record, bytes) else b""
        self._note_size(session, len(record))
        return b"".join(session.entries(record))

    async def add(self, name: bytes, answers: bytes, *, is_first: bool = False) -> None:
        """Append packed answers to a session's record, unless it is full. `is_first`: none was read before, so the
        record is probably new."""
        session = self._session(name)
        if session.key in self._full:
            return
        client = self._clients[session.shard]
        entry = session.entry(answers)
        if len(entry) > MAX_RECORD_BYTES:
            return

        async def begin() -> object:
            async with client.pipeline(transaction=False) as pipe:
                # The expiry comes first, so that no record stays for ever.
                pipe.append(session.key, b"")
                pipe.getex(session.key, ex=self._keep_seconds)
                pipe.append(session.key, entry)
                replies: list[object] = await pipe.execute()
            return replies[-1]

        async def go_on() -> object:
            return await client.append(session.key, entry)

        size = await self._asked(session, begin if is_first else go_on)
        if not isinstance(size, int):
            return
        self._note_size(session, size)
        if size == len(entry) and not is_first:
            # The earlier answers have expired since they were read.
            await self._asked(session, lambda: client.getex(session.key, ex=self._keep_seconds))

    def _session(self, name: bytes) -> Place:
        return Place.of(name, secret=self._secret, prefix=self._prefix, num_shards=len(self._clients))

    def _note_size(self, session: Place, size: int) -> None:
        self._full.pop(session.key, None)
        if size >= MAX_RECORD_BYTES:
            self._full[session.key] = None
            if len(self._full) > REMEMBERED_FULL:
                self._full.popitem(last=False)

    async def _asked(self, session: Place, call: Callable[[], Awaitable[T]]) -> T | None:
        """Return Redis's reply, or None if it fails, is late, or was not asked because it failed before."""
        breaker = self._breakers[session.shard]
        if not breaker.admits(self._clock()):
            self.num_skipped += 1
            return None
        try:
            async with patient_timeout(self._config.timeout_seconds):
                reply = await call()
        except asyncio.CancelledError:
            breaker.abandoned()
            raise
        except Exception as error:  # the server may be no Redis, or under foreign control
            breaker.failed(self._clock())
            kind = error_kind(error)
            if kind is ErrorKind.DENIED and not self.errors[kind]:
                logger.warning(
                    "Redis refuses APPEND or GETEX to this router: answers of sessions are not kept"
                )
            self.errors[kind] += 1
            return None
        breaker.succeeded()
        return reply
