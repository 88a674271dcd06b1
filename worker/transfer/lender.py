"""Lender: sends blocks of this worker to other workers that ask for them.

A thread for each connection answers one request after the other. The engine keeps the blocks while they are sent (a
loan). A loan ends when they are sent, when the connection ends, or when nobody waits for them any more, whichever is
first. A request for blocks that are not here is answered with those that are.
"""

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from blockyard.proto.naming.block_hash import NAME_BYTES, split_names
from blockyard.proto.naming.block_kind import difference
from blockyard.proto.v1.session_pb2 import PullRefusal, PullReply, PullRequest
from blockyard.worker.cache.block_tables import Loan
from blockyard.worker.memory.checksums import crc32_of
from blockyard.worker.memory.transferable import TransferableMemory
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.transfer.neighbours import Neighbours, is_neighbour
from blockyard.worker.transfer.nixl import NIXL, NixlAgent, address_of
from blockyard.worker.transfer.rules import MAX_LOANS, QUEUE_SHARE, LenderFacts, ToldOnce, refusal_of
from blockyard.worker.transfer.wire import (
    TRIAL_SECONDS,
    Connection,
    Cut,
    Late,
    ProtocolError,
    shut,
    trial_blocks,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Each worker that pulls from this one has a few. Further ones are closed at once."""
MAX_SECONDS = 60.0
"""Longest loan, whatever a request says."""
HANDSHAKE_SECONDS = 5.0
IDLE_SECONDS = 300.0
"""Time without a request after which a connection is closed."""
ENGINE_SECONDS = 5.0
"""Longest wait for the engine, which lends between two steps."""

Fence = Callable[[], object]


class Lender:
    """Listens on one port from `start` to `stop`."""

    def __init__(
        self,
        facts: LenderFacts,
        memory: TransferableMemory,
        *,
        lend: Callable[[list[BlockName], int], Future[tuple[Loan, Fence]]],
        end_loan: Callable[[Loan], object],
        context: Callable[[bool], ssl.SSLContext] | None,
        neighbours: Neighbours | None,
        nixl: NixlAgent | None = None,
    ) -> None:
        """`lend` and `end_loan` queue commands for the engine. `lend` takes names and the index of the first one
        that is wanted. `context` makes TLS contexts, None means plaintext. Without `neighbours` it takes TCP alone."""
        self._facts = facts
        self._memory = memory
        self._lend = lend
        self._end_loan = end_loan
        self._context = context
        self._neighbours = neighbours
        self._nixl = nixl
        self._listeners: list[socket.socket] = []
        self._connections: set[socket.socket] = set()
        """Changed under the lock, as `_is_stopping` is."""
        self._lock = threading.Lock()
        self._loans = threading.BoundedSemaphore(MAX_LOANS)
        self._is_stopping = False
        self._told = ToldOnce()
        """Layouts of other workers that are in the log."""
        self._num_answering = 0
        """Requests that are being answered. Changed under the lock, as the next is."""
        self._answered_at = time.monotonic()

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last request was answered. 0 while one is."""
        with self._lock:
            return 0.0 if self._num_answering else time.monotonic() - self._answered_at

    def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OSError where that is not possible."""
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=16)
        self._listeners.append(listener)
        port = int(listener.getsockname()[1])
        if self._neighbours is not None:
            try:
                self._listeners.append(self._neighbours.listen(self._facts.incarnation, port))
            except OSError as error:
                logger.warning("workers of this machine fetch blocks over TCP: no socket for them: %s", error)
        for each in self._listeners:
            threading.Thread(target=self._accept, args=(each,), name="lender", daemon=True).start()
        return port

    def stop(self) -> None:
        """Close the port and all connections. Their loans end."""
        with self._lock:
            self._is_stopping = True
            open_sockets = (*self._listeners, *self._connections)
        for sock in open_sockets:
            shut(sock)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._is_stopping:
                    listener.close()
                    return
                time.sleep(0.1)  # too many open files, for example
                continue
            if self._is_welcome(sock):
                threading.Thread(target=self._serve, args=(sock,), name="lender", daemon=True).start()
            else:
                sock.close()

    def _is_welcome(self, sock: socket.socket) -> bool:
        with self._lock:
            if self._is_stopping or len(self._connections) >= MAX_CONNECTIONS:
                return False
            self._connections.add(sock)
            return True

    def _serve(self, accepted: socket.socket) -> None:
        sock = accepted
        try:
            sock = self._secured(accepted)
            connection = Connection(sock)
            while True:
                connection.deadline = time.monotonic() + IDLE_SECONDS
                request = connection.receive(PullRequest, self._max_request_bytes)
                with self._busy():
                    self._answer(connection, request)
        except ProtocolError as error:
            logger.warning("a connection to the transfer port was closed: it sent %s", error)
        except (Cut, Late, OSError):
            pass  # The other side has gone, or does not take what it asked for. It logs and counts the end of its pull.
        except Exception:
            logger.exception("a transfer failed")
        finally:
            with self._lock:
                self._connections -= {accepted, sock}
            sock.close()
            accepted.close()

    def _secured(self, accepted: socket.socket) -> socket.socket:
        """Return the connection after its handshake, if there is one."""
        if accepted.family == socket.AF_UNIX:
            if not is_neighbour(accepted):
                raise ProtocolError("its credentials: it belongs to another account or container")
            return accepted
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.settimeout(HANDSHAKE_SECONDS)
        if self._context is None:
            return accepted
        secured = self._context(True).wrap_socket(accepted, server_side=True)
        with self._lock:
            self._connections.remove(accepted)  # it is empty now
            self._connections.add(secured)
            if self._is_stopping:
                shut(secured)
        return secured

    @property
    def _max_request_bytes(self) -> int:
        return NAME_BYTES * self._facts.max_blocks + 1024

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        with self._lock:
            self._num_answering += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_answering -= 1
                self._answered_at = time.monotonic()

    def _answer(self, connection: Connection, request: PullRequest) -> None:
        longest = TRIAL_SECONDS if request.trial_bytes else MAX_SECONDS
        seconds = min(request.seconds, longest) if request.seconds > 0 else 0.0
        connection.deadline = time.monotonic() + seconds
        refusal = refusal_of(request, self._facts)
        if refusal:
            if refusal == PullRefusal.PULL_REFUSAL_LAYOUT:
                self._tell_difference(request.layout)
            connection.send(PullReply(refusal=refusal))
            return
        if not self._loans.acquire(timeout=QUEUE_SHARE * seconds):
            connection.send(PullReply(refusal=PullRefusal.PULL_REFUSAL_BUSY))
            return
        nixl = self._nixl if NIXL in request.ways else None
        try:
            if request.trial_bytes:
                self._send_trial(connection, request.trial_bytes, nixl)
                return
            with self._loan(request, seconds) as (loan, fence):
                self._send_blocks(connection, loan, fence, nixl)
        finally:
            self._loans.release()

    def _tell_difference(self, layout: str) -> None:
        if self._told.is_new(layout):
            logger.warning(
                "another worker asks for blocks of another kind, and gets none: %s",
                difference(self._facts.layout, layout),
            )

    def _send_blocks(self, connection: Connection, loan: Loan, fence: Fence, nixl: NixlAgent | None) -> None:
        indices = range(len(loan) - loan.num_unsent, len(loan))
        connection.send(_reply(len(indices), nixl))
        fence()
        for index in indices:
            pieces, checksum = content_of(self._memory, loan, index)
            _send_block(connection, index, pieces, checksum, nixl)
            if nixl is None:
                loan.num_unsent -= 1
                loan.num_sent += 1
        if nixl is not None:
            connection.receive_byte()
            loan.num_unsent, loan.num_sent = 0, len(indices)

    def _send_trial(self, connection: Connection, num_bytes: int, nixl: NixlAgent | None) -> None:
        """Send bytes that measure the link. The engine is not asked, so a long step does not make a trial late."""
        block = memoryview(b"\x55" * self._memory.block_bytes) if nixl is None else nixl.trial
        count = trial_blocks(num_bytes, len(block))
        connection.send(_reply(count, nixl))
        for index in range(count):
            _send_block(connection, index, [block], None, nixl)
        if nixl is not None:
            connection.receive_byte()

    @contextlib.contextmanager
    def _loan(self, request: PullRequest, seconds: float) -> Iterator[tuple[Loan, Fence]]:
        """Keep the blocks of a request. Raises Late where the engine does not answer in time."""
        names = [BlockName(name) for name in split_names(request.names)]
        future = self._lend(names, request.first_block)
        try:
            loan, fence = future.result(min(seconds, ENGINE_SECONDS))
        except TimeoutError as error:
            if not future.cancel():
                future.add_done_callback(self._end_late_loan)
            raise Late from error
        try:
            yield loan, fence
        finally:
            self._end_loan(loan)

    def _end_late_loan(self, future: "Future[tuple[Loan, Fence]]") -> None:
        if future.exception() is None:
            self._end_loan(future.result()[0])


def content_of(memory: TransferableMemory, loan: Loan, index: int) -> tuple[list[memoryview], int | None]:
    """Return the bytes of a lent block, and the checksum that they had when they were saved, if that is known."""
    if index < len(loan.blocks):
        return memory.block(loan.blocks[index]), None
    slot = loan.host_slots[index - len(loan.blocks)]
    return [memory.slot(slot)], memory.checksum(slot)


def _reply(num_blocks: int, nixl: NixlAgent | None) -> PullReply:
    if nixl is None:
        return PullReply(num_blocks=num_blocks)
    return PullReply(num_blocks=num_blocks, way=NIXL, access=nixl.access)


def _send_block(
    connection: Connection, index: int, pieces: list[memoryview], checksum: int | None, nixl: NixlAgent | None
) -> None:
    """Send a block, or where it is."""
    if checksum is None:
        checksum = crc32_of(pieces)
    if nixl is not None:
        connection.send_places(index, [(address_of(piece), len(piece)) for piece in pieces], checksum)
    else:
        connection.send_block(index, pieces, checksum)
