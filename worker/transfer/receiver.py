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

from blockyard.proto.security.peer_sockets import SESSION_NAME
from blockyard.proto.v1.session_pb2 import PullEnd, PullRefusal, PullReply, PullRequest
from blockyard.worker.memory.transferable import TransferableMemory
from blockyard.worker.scheduling.pulls import Pull
from blockyard.worker.transfer.neighbours import Neighbours
from blockyard.worker.transfer.nixl import NIXL, NixlAgent
from blockyard.worker.transfer.rules import Avoided, PullResult, ToldOnce
from blockyard.worker.transfer.wire import (
    HEADER_BYTES,
    MAX_REPLY_BYTES,
    TRIAL_BYTES,
    TRIAL_SECONDS,
    Connection,
    Cut,
    Late,
    Memory,
    NotWanted,
    ProtocolError,
    trial_blocks,
)

logger = logging.getLogger(__name__)

MAX_IDLE = 64
"""Connections kept open for later pulls. Restarted sources leave connections that nobody uses again."""
MAX_AT_ONCE = 4
"""Pulls served at once. They share one link, so more would only end later. Others wait for their turn."""
CONNECT_SECONDS = 2.0
"""Longest wait for a connection and its handshake."""
MEASURED_SECONDS = 60.0
"""Time for which a measurement is fresh, so that no trial is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Blocks to fetch from one source, for a pull or a trial."""

    address: str
    incarnation: str
    request: PullRequest
    """It lacks the time that is left."""
    num_blocks: int
    place: Callable[[int], memoryview]
    """Returns the memory for the block of this number, counted from 0."""
    arrived: Callable[[int, int], None]
    """Takes the number of a block that has arrived intact, and its checksum."""
    is_cancelled: Callable[[], bool] = lambda: False


class Receiver:
    """Runs the pulls of one worker."""

    def __init__(
        self,
        layout: str,
        memory: TransferableMemory,
        *,
        context: Callable[[bool], ssl.SSLContext] | None,
        neighbours: Neighbours | None,
        on_end: Callable[[Pull, PullResult], object],
        on_trial_end: Callable[[PullResult], object],
        nixl: NixlAgent | None = None,
    ) -> None:
        """`on_end` takes each pull's result, on the pull's thread. Then nothing writes to its slots any more.
        `on_trial_end` takes those of trials. `context` makes TLS contexts, None means plaintext."""
        self._layout = layout
        self._memory = memory
        self._context = context
        self._neighbours = neighbours
        self._nixl = nixl
        self._on_end = on_end
        self._on_trial_end = on_trial_end
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="pull")
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], Connection] = {}
        """An open connection to each source, by address and incarnation."""
        self._avoided = Avoided()
        self._told = ToldOnce()
        """Refusals that are in the log."""
        self._without_nixl: set[str] = set()
        """Addresses of sources that have been said to have no NIXL."""
        self._measured_at = -MEASURED_SECONDS
        """Time of the last measurement. Changed under the lock, as the next two are."""
        self._is_in_trial = False
        self._is_stopping = False

    def start(self, pull: Pull, fence: Callable[[], object]) -> None:
        """Queue a pull, and return at once. `fence` waits until the device no longer uses the slots."""
        deadline = time.monotonic() + pull.order.seconds
        self._threads.submit(self._run_pull, pull, fence, deadline)

    def measure(self, address: str, incarnation: str) -> None:
        """Begin a trial of the link from a worker, unless one runs or a measurement is fresh."""
        with self._lock:
            is_fresh = time.monotonic() < self._measured_at + MEASURED_SECONDS
            if is_fresh or self._is_in_trial or self._is_stopping:
                return
            self._is_in_trial = True
            self._threads.submit(self._run_trial, address, incarnation)

    def stop(self) -> None:
        """End all pulls, and wait for that."""
        with self._lock:
            self._is_stopping = True
        self._threads.shutdown()
        for connection in self._idle.values():
            connection.close()

    def _run_pull(self, pull: Pull, fence: Callable[[], object], deadline: float) -> None:
        def arrived(number: int, checksum: int) -> None:
            self._memory.received(pull.slots[number], checksum)
            pull.num_arrived += 1

        wanted = _Wanted(
            address=pull.order.address,
            incarnation=pull.order.incarnation,
            request=PullRequest(names=b"".join(pull.prefix), first_block=len(pull.head)),
            num_blocks=len(pull.slots),
            place=lambda number: self._memory.slot(pull.slots[number]),
            arrived=arrived,
            is_cancelled=lambda: pull.is_cancelled,
        )
        self._on_end(pull, self._result(wanted, deadline, fence))

    def _run_trial(self, address: str, incarnation: str) -> None:
        block = memoryview(bytearray(self._memory.block_bytes))
        wanted = _Wanted(
            address=address,
            incarnation=incarnation,
            request=PullRequest(trial_bytes=TRIAL_BYTES),
            num_blocks=trial_blocks(TRIAL_BYTES, len(block)),
            place=lambda number: block,
            arrived=lambda number, checksum: None,
        )
        result = self._result(wanted, time.monotonic() + TRIAL_SECONDS, lambda: None)
        with self._lock:
            self._is_in_trial = False
        self._on_trial_end(result)

    def _result(self, wanted: _Wanted, deadline: float, fence: Callable[[], object]) -> PullResult:
        attempt = _Attempt(wanted, deadline, self._memory.block_bytes)
        try:
            fence()
            end = self._fetch(attempt)
        except Exception:
            logger.exception("a pull failed")
            end = PullEnd.PULL_END_CUT
        result = attempt.result(end)
        if result.is_measured and result.num_arrived:
            with self._lock:
                self._measured_at = time.monotonic()
        return result

    def _fetch(self, attempt: "_Attempt") -> PullEnd:
        wanted, source = attempt.wanted, attempt.wanted.address
        if wanted.is_cancelled() or self._is_stopping:
            return PullEnd.PULL_END_CANCELLED
        if time.monotonic() >= attempt.deadline:
            return PullEnd.PULL_END_LATE  # its turn came too late, which is not the source's fault
        if self._avoided.holds(source, time.monotonic()):
            return PullEnd.PULL_END_AVOIDED
        end = self._tried(attempt)
        self._avoided.note(source, end, has_answer=attempt.has_answer, now=time.monotonic())
        return end

    def _tried(self, attempt: "_Attempt") -> PullEnd:
        source = attempt.wanted.address
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
        wanted = attempt.wanted
        key = wanted.address, wanted.incarnation
        with self._lock:
            connection = self._idle.pop(key, None)
        if connection is not None:
            try:
                return self._ask(connection, key, attempt)
            except Cut:
                if attempt.has_answer:
                    raise
        return self._ask(self._connect(wanted, attempt.deadline), key, attempt)

    def _ask(self, connection: Connection, key: tuple[str, str], attempt: "_Attempt") -> PullEnd:
        """Fetch on this connection. Keep it for the next pull where nothing is left on it, and close it otherwise."""
        connection.deadline = attempt.deadline
        connection.is_wanted = lambda: not (attempt.wanted.is_cancelled() or self._is_stopping)
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
                elif len(self._idle) > MAX_IDLE:
                    self._idle.pop(next(iter(self._idle))).close()
        return end

    def _exchange(self, connection: Connection, attempt: "_Attempt") -> PullEnd:
        wanted, request = attempt.wanted, PullRequest()
        request.CopyFrom(wanted.request)
        request.incarnation, request.layout = wanted.incarnation, self._layout
        request.seconds = attempt.deadline - time.monotonic()
        by_nixl = self._nixl is not None and self._nixl.has_staging()
        request.ways.extend([NIXL] if by_nixl else [])
        connection.send(request)
        reply = connection.receive(PullReply, MAX_REPLY_BYTES)
        attempt.answered(connection)
        if reply.refusal:
            attempt.refusal = reply.refusal
            if reply.refusal != PullRefusal.PULL_REFUSAL_BUSY:
                self._tell_refusal(wanted, reply.refusal)
            return PullEnd.PULL_END_REFUSED
        if reply.num_blocks > wanted.num_blocks:
            raise ProtocolError(f"{reply.num_blocks} blocks where {wanted.num_blocks} were asked for")
        memory = self._memory_of(connection, reply) if reply.way else None
        if by_nixl and memory is None and wanted.address not in self._without_nixl:
            logger.info(
                "worker %s does not lend by NIXL: its blocks come over this connection", wanted.address
            )
            self._without_nixl.add(wanted.address)
        for number in range(reply.num_blocks):
            index, place = request.first_block + number, wanted.place(number)
            if memory is None:
                checksum = connection.receive_block(index, place)
            else:
                checksum = connection.read_block(index, place, memory)
            wanted.arrived(number, checksum)
            attempt.num_blocks += 1
        if memory is not None:
            connection.send_byte()
        return PullEnd.PULL_END_WHOLE if reply.num_blocks == wanted.num_blocks else PullEnd.PULL_END_FEWER

    def _tell_refusal(self, wanted: _Wanted, refusal: PullRefusal) -> None:
        reason = PullRefusal.Name(refusal).removeprefix("PULL_REFUSAL_")
        if self._told.is_new((wanted.address, wanted.incarnation, reason)):
            logger.warning("worker %s refuses to send blocks: %s differs", wanted.address, reason)

    def _memory_of(self, connection: Connection, reply: PullReply) -> Memory:
        if reply.way != NIXL or self._nixl is None:
            raise ProtocolError(f"blocks by {reply.way!r}, which was not asked for")
        return self._nixl.memory_of(reply.access, connection.check)

    def _connect(self, wanted: _Wanted, deadline: float) -> Connection:
        """Raises OSError, or ValueError for an address that is none."""
        host, _, port = wanted.address.rpartition(":")
        seconds = min(CONNECT_SECONDS, deadline - time.monotonic())
        if seconds <= 0:
            raise Late
        if self._neighbours is not None:
            near = self._neighbours.connect(wanted.incarnation, int(port), seconds)
            if near is not None:
                return Connection(near)
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

    def __init__(self, wanted: _Wanted, deadline: float, block_bytes: int) -> None:
        self.wanted = wanted
        self.deadline = deadline
        """Time on the monotonic clock."""
        self.num_blocks = 0
        self.refusal = PullRefusal.PULL_REFUSAL_UNSPECIFIED
        self._block_bytes = block_bytes
        self._began = time.monotonic()
        self._answered_at = self._began
        self._answered_by: Connection | None = None
        self._num_read = 0

    @property
    def has_answer(self) -> bool:
        return self._answered_by is not None

    def answered(self, connection: Connection) -> None:
        self._answered_at = time.monotonic()
        self._answered_by, self._num_read = connection, connection.num_read

    def result(self, end: PullEnd) -> PullResult:
        now, source = time.monotonic(), self._answered_by
        if source is None:
            return PullResult(end=end, setup_seconds=now - self._began)
        return PullResult(
            end=end,
            num_blocks=self.num_blocks,
            num_bytes=self.num_blocks * self._block_bytes,
            setup_seconds=self._answered_at - self._began,
            transfer_seconds=now - self._answered_at,
            has_answer=True,
            num_arrived=(source.num_read - self._num_read) / (self._block_bytes + HEADER_BYTES),
            refusal=self.refusal,
        )
