"""Receiver: fetches the blocks of pulls into host slots, each pull on a thread, a few at once.

Nothing that a source does can harm. A block counts only once its bytes agree with their checksum. Every wait ends
at the pull's deadline, or soon after its cancellation. A source that has failed is avoided for a while.
"""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from blockyard.proto.security.tls import SESSION_NAME
from blockyard.proto.v1.session_pb2 import PullEnd, PullReply, PullRequest
from blockyard.worker.memory.transferable import TransferableMemory
from blockyard.worker.scheduling.pulls import Pull
from blockyard.worker.transfer.wire import (
    MAX_REPLY_BYTES,
    Connection,
    Cut,
    Late,
    NotWanted,
    ProtocolError,
)

logger = logging.getLogger(__name__)

AVOIDED_SECONDS = {
    PullEnd.PULL_END_CORRUPT: 60.0,
    PullEnd.PULL_END_CUT: 5.0,
    PullEnd.PULL_END_LATE: 5.0,
    PullEnd.PULL_END_UNREACHABLE: 5.0,
}
"""Time for which nothing is fetched from a source after a pull that ended so."""
MAX_AT_ONCE = 4
"""Pulls served at once. They share one link, so more would only end later. Others wait for their turn."""
CONNECT_SECONDS = 2.0
"""Longest wait for a connection and its handshake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """Result of a pull."""

    end: PullEnd
    num_blocks: int = 0
    """Leading blocks that arrived intact."""
    num_bytes: int = 0
    setup_seconds: float = 0.0
    """Time until the source's answer."""
    transfer_seconds: float = 0.0
    """Time from there to the last byte."""


class Receiver:
    """Runs the pulls of one worker."""

    def __init__(
        self,
        layout: str,
        memory: TransferableMemory,
        *,
        context: Callable[[bool], ssl.SSLContext] | None,
        on_end: Callable[[Pull, PullResult], object],
    ) -> None:
        """`on_end` takes each pull's result, on the pull's thread. Then nothing writes to its slots any more. `context`
        makes TLS contexts, None means plaintext."""
        self._layout = layout
        self._memory = memory
        self._context = context
        self._on_end = on_end
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="pull")
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], Connection] = {}
        """An open connection to each source, by address and incarnation."""
        self._avoided: dict[str, float] = {}
        """Times until which sources are avoided, by address."""
        self._is_stopping = False

    def start(self, pull: Pull, fence: Callable[[], object]) -> None:
        """Queue a pull, and return at once. `fence` waits until the device no longer uses the slots."""
        deadline = time.monotonic() + pull.order.seconds
        self._threads.submit(self._run, pull, fence, deadline)

    def stop(self) -> None:
        """End all pulls, and wait for that."""
        self._is_stopping = True
        self._threads.shutdown()
        for connection in self._idle.values():
            connection.close()

    def _run(self, pull: Pull, fence: Callable[[], object], deadline: float) -> None:
        attempt = _Attempt(pull, deadline)
        try:
            fence()
            end = self._fetch(attempt)
        except Exception:
            logger.exception("a pull failed")
            end = PullEnd.PULL_END_CUT
        self._on_end(pull, attempt.result(end))

    def _fetch(self, attempt: "_Attempt") -> PullEnd:
        source = attempt.pull.order.address
        if attempt.pull.is_cancelled or self._is_stopping:
            return PullEnd.PULL_END_CANCELLED
        if time.monotonic() >= attempt.deadline:
            return PullEnd.PULL_END_LATE  # its turn came too late, which is not the source's fault
        if time.monotonic() < self._avoided.get(source, 0.0):
            return PullEnd.PULL_END_AVOIDED
        end = self._tried(attempt)
        if end in AVOIDED_SECONDS:
            self._avoided[source] = time.monotonic() + AVOIDED_SECONDS[end]
        return end

    def _tried(self, attempt: "_Attempt") -> PullEnd:
        source = attempt.pull.order.address
        try:
            return self._talk(attempt)
        except ProtocolError as error:
            logger.warning("a pull from worker %s ends: it sent %s", source, error)
            return PullEnd.PULL_END_CORRUPT
        except Late:
            return PullEnd.PULL_END_LATE
        except NotWanted:
            return PullEnd.PULL_END_CANCELLED
        except Cut:
            return PullEnd.PULL_END_CUT
        except (OSError, ValueError) as error:
            logger.warning("cannot reach worker %s for blocks: %s", source, type(error).__name__)
            return PullEnd.PULL_END_UNREACHABLE

    def _talk(self, attempt: "_Attempt") -> PullEnd:
        """Fetch on a connection that is open, or else on a new one. An open one may have ended meanwhile."""
        pull = attempt.pull
        key = pull.order.address, pull.order.incarnation
        with self._lock:
            connection = self._idle.pop(key, None)
        if connection is not None:
            try:
                return self._ask(connection, key, attempt)
            except Cut:
                if attempt.has_answer:
                    raise
        return self._ask(self._connect(pull.order.address, attempt.deadline), key, attempt)

    def _ask(self, connection: Connection, key: tuple[str, str], attempt: "_Attempt") -> PullEnd:
        """Fetch on this connection. Keep it for the next pull where nothing is left on it, and close it otherwise."""
        connection.deadline = attempt.deadline
        connection.is_wanted = lambda: not (attempt.pull.is_cancelled or self._is_stopping)
        is_clear = False
        try:
            end = self._exchange(connection, attempt)
            is_clear = True
        finally:
            with self._lock:
                if (
                    not is_clear
                    or self._is_stopping
                    or self._idle.setdefault(key, connection) is not connection
                ):
                    connection.close()
        return end

    def _exchange(self, connection: Connection, attempt: "_Attempt") -> PullEnd:
        pull = attempt.pull
        first, num_wanted = len(pull.head), len(pull.slots)
        connection.send(
            PullRequest(
                incarnation=pull.order.incarnation,
                layout=self._layout,
                names=b"".join(pull.prefix),
                first_block=first,
                seconds=attempt.deadline - time.monotonic(),
            )
        )
        reply = connection.receive(PullReply, MAX_REPLY_BYTES)
        attempt.answered()
        if reply.refusal:
            return PullEnd.PULL_END_REFUSED
        if reply.num_blocks > num_wanted:
            raise ProtocolError(f"{reply.num_blocks} blocks where {num_wanted} were asked for")
        for index, slot in enumerate(pull.slots[: reply.num_blocks], start=first):
            checksum = connection.receive_block(index, self._memory.slot(slot))
            self._memory.received(slot, checksum)
            attempt.num_blocks += 1
            attempt.num_bytes += self._memory.block_bytes
        return PullEnd.PULL_END_WHOLE if reply.num_blocks == num_wanted else PullEnd.PULL_END_FEWER

    def _connect(self, address: str, deadline: float) -> Connection:
        """Raises OSError, or ValueError for an address that is none."""
        host, _, port = address.rpartition(":")
        seconds = min(CONNECT_SECONDS, deadline - time.monotonic())
        if seconds <= 0:
            raise Late
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context(False).wrap_socket(sock, server_hostname=SESSION_NAME)
        except BaseException:
            sock.close()
            raise
        return Connection(sock)


class _Attempt:
    """One pull's progress. Changed on the pull's thread."""

    def __init__(self, pull: Pull, deadline: float) -> None:
        self.pull = pull
        self.deadline = deadline
        """Time on the monotonic clock."""
        self.num_blocks = 0
        self.num_bytes = 0
        self._began = time.monotonic()
        self._answered: float | None = None

    @property
    def has_answer(self) -> bool:
        return self._answered is not None

    def answered(self) -> None:
        self._answered = time.monotonic()

    def result(self, end: PullEnd) -> PullResult:
        answered = time.monotonic() if self._answered is None else self._answered
        return PullResult(
            end=end,
            num_blocks=self.num_blocks,
            num_bytes=self.num_bytes,
            setup_seconds=answered - self._began,
            transfer_seconds=time.monotonic() - answered,
        )
