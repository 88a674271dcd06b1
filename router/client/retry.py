"""When to try again, where, and until when.

Pure but for the clock and the random source it is given. The sync and async clients only sleep and send.

A call is retried as long as nothing of its answer came: on UNAVAILABLE, and on RESOURCE_EXHAUSTED where the
server says when to come back (without that it may be a message that is too large for ever).

Behind one address may be several routers, and a frozen one of them takes connections and says nothing. Such a
connection is given up after `connect_seconds`. Nothing can have begun on it, so another is tried until the deadline.
"""

import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from blockyard.proto.naming.identifiers import MAX_NAME_CHARS, TENANT_KEY, is_id
from blockyard.router.client.errors import (
    BlockyardError,
    NotFoundError,
    OverloadedError,
    TimedOutError,
    UnavailableError,
)

DEFAULT_TIMEOUT_SECONDS = 120.0
MAX_TOKEN_CHARS = 4096
_TOKEN = re.compile(rf"[!-~]{{1,{MAX_TOKEN_CHARS}}}")
HAND_OVER_SECONDS = 60.0
"""Of a drain, beyond its grace: the step under way has to end."""

DEFAULT_CONNECT_SECONDS = 2.0
"""A new connection has so long, with the greetings of TLS and HTTP/2; gRPC's own bound is 20 s."""
MAX_CONNECT_SECONDS = 3600.0
KEEPALIVE_SECONDS = 10
"""A router that froze in mid-call is noticed after twice that."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # gRPC's own 4 MiB holds neither a million token ids nor a large pool.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_SECONDS * 1000),
    # However long a first token takes.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # A router that came back is found within 2 s; by default it may take 2 minutes.
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Each client is a connection of its own. Behind a port that routers share a connection is one of them: clients of
    # one program that shared it, as they would by default, would all use the same router.
    ("grpc.use_local_subchannel_pool", 1),
)


def channel_options(connect_seconds: float) -> tuple[tuple[str, int], ...]:
    """Raises ValueError."""
    if not 0.0 < connect_seconds <= MAX_CONNECT_SECONDS:
        raise ValueError(
            f"connect_seconds must be positive and at most {MAX_CONNECT_SECONDS:g}, not {connect_seconds}"
        )
    # gRPC names it after the pause between attempts; it bounds each attempt as well.
    return (*CHANNEL_OPTIONS, ("grpc.min_reconnect_backoff_ms", math.ceil(connect_seconds * 1000)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What both clients are made of. Raises ValueError for values that make no sense."""

    addresses: tuple[str, ...]
    """Routers as "host:port"; each can serve everything."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """For a call as a whole, its retries included, unless the call brings its own."""
    retries: int = 3
    first_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not self.addresses or not all(self.addresses):
            raise ValueError("give at least one router address, as host:port")
        if self.retries < 0:
            raise ValueError(f"retries must not be negative, not {self.retries}")
        check_timeout(self.timeout_seconds)

    @classmethod
    def of(cls, addresses: str | Sequence[str], *, timeout_seconds: float, retries: int) -> "ClientConfig":
        """Takes one address, several, or several in one string with commas between. Raises ValueError."""
        listed = addresses.split(",") if isinstance(addresses, str) else addresses
        stripped = tuple(address.strip() for address in listed)
        for address in filter(None, stripped):
            _check_address(address)
        return cls(addresses=stripped, timeout_seconds=timeout_seconds, retries=retries)


def _check_address(address: str) -> None:
    """Raises ValueError for a URL, and for an address without a port, which gRPC would take for that of HTTPS."""
    scheme, separator, rest = address.partition("://")
    if separator and scheme in ("http", "https"):
        raise ValueError(
            f"a router's address is host:port, without {scheme}://: did you mean {rest.rstrip('/')}?"
        )
    if not address.startswith("unix:") and not re.search(r":\d+$", address):
        raise ValueError(f"a router's address is host:port, and {address!r} has no port")


def check_timeout(timeout_seconds: float) -> float:
    """Raises ValueError unless it is positive and finite: every call has a deadline."""
    if not 0.0 < timeout_seconds < math.inf:
        raise ValueError(f"timeout_seconds must be positive and finite, not {timeout_seconds}")
    return timeout_seconds


def call_metadata(token: str | None, tenant: str | None) -> tuple[tuple[str, str], ...]:
    """Of each call. Raises ValueError for a token or tenant that no router takes, TypeError for one that is no text."""
    metadata = () if token is None else (("authorization", f"Bearer {_checked_token(token)}"),)
    if tenant is None:
        return metadata
    if not isinstance(tenant, str):
        raise TypeError(f"tenant: must be text, not {type(tenant).__name__}")
    if not is_id(tenant):
        raise ValueError(
            f"tenant: must be 1 to {MAX_NAME_CHARS} letters, digits or any of . _ : -, not {tenant[:40]!r}"
        )
    return (*metadata, (TENANT_KEY, tenant))


def _checked_token(token: str) -> str:
    """Nothing of it is told. Raises ValueError for what no metadata can hold."""
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise ValueError(f"token: must be 1 to {MAX_TOKEN_CHARS} visible ASCII characters without spaces")
    return token


def abort_failure(failures: Sequence[BlockyardError]) -> BlockyardError:
    """What the failures of an abort at every router amount to: not found only if every one of them said so."""
    return next((error for error in failures if not isinstance(error, NotFoundError)), failures[0])


class AddressRotation:
    """The router in use: the same one until it fails. Clients begin at different ones."""

    def __init__(self, addresses: Sequence[str], *, start: int | None = None) -> None:
        self._addresses = tuple(addresses)
        self._current = random.randrange(len(addresses)) if start is None else start

    @property
    def current(self) -> str:
        return self._addresses[self._current % len(self._addresses)]

    def leave_after(self, failure: BlockyardError, address: str) -> None:
        """Moves on where another router may do better, unless another call already did."""
        if isinstance(failure, UnavailableError | OverloadedError) and address == self.current:
            self._current += 1


class Attempts:
    """The attempts of one call: how long each may take, and how long to wait after a failed one."""

    def __init__(
        self,
        config: ClientConfig,
        timeout_seconds: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._config = config
        self._now = now
        self._jitter = jitter
        self._timeout_seconds = config.timeout_seconds
        if timeout_seconds is not None:
            self._timeout_seconds = check_timeout(timeout_seconds)
        self._deadline = self._now() + self._timeout_seconds
        self._failures = 0
        self._silence: UnavailableError | None = None
        """What the last attempt met, where the next one is sent once somebody speaks on a new connection."""

    def remaining_seconds(self) -> float:
        """For the next attempt. Raises TimedOutError if nothing is left."""
        remaining_seconds = self._deadline - self._now()
        if remaining_seconds <= 0:
            raise TimedOutError(
                f"no answer within {self._timeout_seconds:g} s", code=grpc.StatusCode.DEADLINE_EXCEEDED
            )
        return remaining_seconds

    def delay_after(self, error: BlockyardError) -> float:
        """Seconds to wait before the next attempt. Raises `error` where there should be none."""
        if self._silence is not None and isinstance(error, TimedOutError):
            raise self._silence
        if isinstance(error, TimedOutError) and not error.reason:
            raise TimedOutError(f"gave up after {self._timeout_seconds:g} s", code=error.code)
        self._silence = self._silence_of(error)
        if self._silence is not None:
            return 0.0
        backoff_seconds = self._backoff_seconds(error)
        self._failures += 1
        if backoff_seconds is None or self._failures > self._config.retries:
            raise error
        if self._now() + backoff_seconds >= self._deadline:
            raise error
        return backoff_seconds

    @property
    def waits_for_connection(self) -> bool:
        """Whether the next attempt is sent once there is a connection on which somebody speaks."""
        return self._silence is not None

    def _silence_of(self, error: BlockyardError) -> UnavailableError | None:
        """None where there are other addresses: the next is as good a chance as another connection."""
        if isinstance(error, UnavailableError) and error.never_began and len(self._config.addresses) == 1:
            return error if self._config.retries else None
        return None

    def _backoff_seconds(self, error: BlockyardError) -> float | None:
        longest = min(
            self._config.max_backoff_seconds, self._config.first_backoff_seconds * 2.0**self._failures
        )
        match error:
            case UnavailableError() | OverloadedError() if error.retry_delay_seconds is not None:
                # Never before the server's word; spread after it, or all who were sent away return at once.
                return error.retry_delay_seconds + self._jitter(0.0, longest)
            case UnavailableError():
                return self._jitter(0.0, longest)
            case _:
                return None
