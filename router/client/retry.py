"""Retry rules of the clients: when to try again, at which address, and until when.

Pure, except for the clock and the random source that it is given. The clients themselves only sleep and send.

A call is retried at most `retries` times, and only while no part of its answer was received. UNAVAILABLE is retried.
RESOURCE_EXHAUSTED is retried if the server gives a delay: without one it may be a message that is always too large.

Several routers may share one address, and a frozen one among them accepts connections and sends nothing. Such a
connection is given up after `connect_seconds`. No call can have begun on it. So a client with one address tries again
until the deadline, and does not count such attempts. With `retries` 0 it tries none.
"""

import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from blockyard.proto.limits import MAX_RESPONSE_BYTES
from blockyard.proto.naming import headers
from blockyard.proto.naming.identifiers import MAX_NAME_CHARS, is_id
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
"""Time for a drain beyond its grace period, in which the current step ends."""

DEFAULT_CONNECT_SECONDS = 2.0
"""Time limit of a new connection, with the greetings of TLS and HTTP/2. gRPC's own limit is 20 s."""
MAX_CONNECT_SECONDS = 3600.0
KEEPALIVE_SECONDS = 10
"""Interval of pings. A router that freezes during a call is noticed after twice this time."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_SECONDS * 1000),
    # Pings continue however long the first token takes.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # A router that came back is found within 2 s. The default may take 2 minutes.
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Each client has a connection of its own. By default the clients of one program would share one, and so would all
    # use the same router of several that share a port.
    ("grpc.use_local_subchannel_pool", 1),
)


def channel_options(connect_seconds: float) -> tuple[tuple[str, int], ...]:
    """Return gRPC's channel options with this time limit of a new connection. Raises ValueError."""
    if not 0.0 < connect_seconds <= MAX_CONNECT_SECONDS:
        raise ValueError(
            f"connect_seconds must be positive and at most {MAX_CONNECT_SECONDS:g}, not {connect_seconds}"
        )
    # gRPC names it after the pause between attempts, but it limits each attempt as well.
    return (*CHANNEL_OPTIONS, ("grpc.min_reconnect_backoff_ms", math.ceil(connect_seconds * 1000)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings that both clients share. Raises ValueError for values out of bounds."""

    addresses: tuple[str, ...]
    """Routers as "host:port". Each can serve every call."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """Time limit of a call with its retries, unless the call has its own."""
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
        """Return the settings for one address, a list of them, or one string of several with commas between.

        Raises ValueError.
        """
        listed = addresses.split(",") if isinstance(addresses, str) else addresses
        stripped = tuple(address.strip() for address in listed)
        for address in filter(None, stripped):
            _check_address(address)
        return cls(addresses=stripped, timeout_seconds=timeout_seconds, retries=retries)


def _check_address(address: str) -> None:
    """Raise ValueError for a URL, and for an address without a port, where gRPC would take port 443."""
    scheme, separator, rest = address.partition("://")
    if separator and scheme in ("http", "https"):
        raise ValueError(
            f"a router's address is host:port, without {scheme}://: did you mean {rest.rstrip('/')}?"
        )
    if not address.startswith("unix:") and not re.search(r":\d+$", address):
        raise ValueError(f"a router's address is host:port, and {address!r} has no port")


def check_timeout(timeout_seconds: float) -> float:
    """Return the timeout. Raises ValueError unless it is positive and finite: every call has a deadline."""
    if not 0.0 < timeout_seconds < math.inf:
        raise ValueError(f"timeout_seconds must be positive and finite, not {timeout_seconds}")
    return timeout_seconds


def call_metadata(token: str | None, tenant: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of each call, with its token and tenant.

    Raises ValueError for a token or tenant that no router accepts, and TypeError for one that is not text.
    """
    metadata = () if token is None else ((headers.AUTHORIZATION, f"Bearer {_checked_token(token)}"),)
    if tenant is None:
        return metadata
    if not isinstance(tenant, str):
        raise TypeError(f"tenant: must be text, not {type(tenant).__name__}")
    if not is_id(tenant):
        raise ValueError(
            f"tenant: must be 1 to {MAX_NAME_CHARS} letters, digits or any of . _ : -, not {tenant[:40]!r}"
        )
    return (*metadata, (headers.TENANT, tenant))


def _checked_token(token: str) -> str:
    """Return the token. Raises ValueError, without any part of the token, for text that metadata cannot hold."""
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise ValueError(f"token: must be 1 to {MAX_TOKEN_CHARS} visible ASCII characters without spaces")
    return token


def abort_failure(failures: Sequence[BlockyardError]) -> BlockyardError:
    """Return the error of an abort that failed at every address: NotFoundError only if every router said so."""
    return next((error for error in failures if not isinstance(error, NotFoundError)), failures[0])


class AddressRotation:
    """Keeps one address in use until a router there fails or is overloaded. Each client starts at a random one."""

    def __init__(self, addresses: Sequence[str], *, start: int | None = None) -> None:
        self._addresses = tuple(addresses)
        self._current = random.randrange(len(addresses)) if start is None else start

    @property
    def current(self) -> str:
        return self._addresses[self._current % len(self._addresses)]

    def leave_after(self, failure: BlockyardError, address: str) -> None:
        """Move to the next address if another router may do better, unless another call has already left this one."""
        if isinstance(failure, UnavailableError | OverloadedError) and address == self.current:
            self._current += 1


class Attempts:
    """Attempts of one call: how long the next may take, and how long to wait before it."""

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
        """Failure of the last attempt if its connection brought no greeting. The next attempt waits for a
        connection."""

    def remaining_seconds(self) -> float:
        """Return the time left for the next attempt. Raises TimedOutError if there is none."""
        remaining_seconds = self._deadline - self._now()
        if remaining_seconds <= 0:
            raise TimedOutError(
                f"no answer within {self._timeout_seconds:g} s", code=grpc.StatusCode.DEADLINE_EXCEEDED
            )
        return remaining_seconds

    def delay_after(self, error: BlockyardError) -> float:
        """Count a failed attempt, and return the seconds to wait before the next. Raises the call's error if there must
        be none."""
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
        """True if the next attempt waits until a connection has brought a greeting."""
        return self._silence is not None

    def _silence_of(self, error: BlockyardError) -> UnavailableError | None:
        """Return the error if its connection brought no greeting and no other address can be tried instead, else
        None."""
        if isinstance(error, UnavailableError) and error.never_began and len(self._config.addresses) == 1:
            return error if self._config.retries else None
        return None

    def _backoff_seconds(self, error: BlockyardError) -> float | None:
        longest = min(
            self._config.max_backoff_seconds, self._config.first_backoff_seconds * 2.0**self._failures
        )
        match error:
            case UnavailableError() | OverloadedError() if error.retry_delay_seconds is not None:
                # Never before the server's delay; with jitter after it, or all refused clients return at once.
                return error.retry_delay_seconds + self._jitter(0.0, longest)
            case UnavailableError():
                return self._jitter(0.0, longest)
            case _:
                return None
