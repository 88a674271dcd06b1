"""Transfers between simulated workers: the exchange of each worker, over links that take virtual time.

A link carries one block after the other, as a network card does. Lending, caching and the rules of transfers are the
product's own. Where a worker's runner has memory, blocks travel as the frames of a real connection. Otherwise time
alone decides what arrives. Owns the streams between workers, and what faults do to them.
"""

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from blockyard.proto.naming.block_hash import split_names
from blockyard.proto.v1.session_pb2 import PullEnd, PullRefusal, PullReply, PullRequest
from blockyard.worker.cache.block_tables import Loan
from blockyard.worker.engine import Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.memory.transferable import TransferableMemory
from blockyard.worker.scheduling.pulls import Pull
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.session.session import SessionService
from blockyard.worker.transfer.lender import content_of
from blockyard.worker.transfer.rules import (
    MAX_LOANS,
    QUEUE_SHARE,
    Avoided,
    LenderFacts,
    PullResult,
    refusal_of,
    take_pull,
)
from blockyard.worker.transfer.wire import Connection, Cut, NotWanted, ProtocolError

from simulation.virtual_time import PROCESS, Process

TRANSFER_PORT = 1
LAYOUT = "simulated"
LOOK_SECONDS = 0.05
"""Interval at which a reader asks whether its bytes are still wanted, and a link whether it is whole again."""


@dataclass(slots=True, eq=False)
class Card:
    """The network card of one host, across incarnations of its worker."""

    free_at: float = 0.0
    """When it has carried all that was given to it."""
    slowness: float = 1.0
    is_cut: bool = False
    is_stuck: bool = False
    """Whether its host's reads do not end, not even at their deadline."""
    harm: Callable[[bytes], bytes] | None = None
    """Returns what becomes of a frame that passes."""


@dataclass(slots=True, kw_only=True)
class TransferNetwork:
    """All exchanges of one run, by transfer address."""

    bytes_per_second: float
    """Rate of each worker's link, in each direction."""
    setup_seconds: float
    """Time until a source hears of a pull, and until its answer is back."""
    exchanges: "dict[str, VirtualExchange]" = field(default_factory=dict)
    cards: dict[str, Card] = field(default_factory=dict)
    """The card of each host."""
    streams: "list[Stream]" = field(default_factory=list)
    """All that are open."""
    on_end: Callable[[str, str, Pull, PullResult], object] = lambda reader, source, pull, result: None
    """Takes each pull that has ended, with the incarnations of its reader and its source, "" where there was none."""
    num_mutual: int = 0
    """Pulls that began while the source pulled from the destination."""

    def card(self, host: str) -> Card:
        return self.cards.setdefault(host, Card())

    def reset(self, host: str) -> None:
        """End every stream of a host. Both ends see it."""
        for stream in tuple(self.streams):
            if host in (stream.source.host, stream.reader.host):
                stream.tear()

    def died(self, process: Process) -> None:
        """Close what a dead process had open, as a kernel does."""
        for stream in tuple(self.streams):
            if process in (stream.source.process, stream.reader.process):
                stream.tear()


class Stream:
    """A connection on which one pull is served. Its reader closes it."""

    def __init__(
        self, reader: "VirtualExchange", source: "VirtualExchange", network: TransferNetwork
    ) -> None:
        self.reader, self.source = reader, source
        self.serving: asyncio.Task[None] | None = None
        self._network = network
        self._arrived = asyncio.Queue[PullReply | bytes | None]()
        network.num_mutual += any(
            (other.reader, other.source) == (source, reader) for other in network.streams
        )
        network.streams.append(self)

    async def send(self, item: PullReply | bytes, num_bytes: int = 0) -> None:
        """Carry a reply, or the frame of a block that takes as long as `num_bytes`."""
        loop, network = asyncio.get_running_loop(), self._network
        cards = network.card(self.reader.host), network.card(self.source.host)
        while any(card.is_cut for card in cards):  # noqa: ASYNC110 - a fault may end without an event
            await asyncio.sleep(LOOK_SECONDS)
        if num_bytes:
            seconds = num_bytes / network.bytes_per_second * max(card.slowness for card in cards)
            free_at = max(loop.time(), *(card.free_at for card in cards)) + seconds
            for card in cards:
                card.free_at = free_at
            await asyncio.sleep(free_at - loop.time())
        for card in cards:
            if card.harm is not None and isinstance(item, bytes):
                item = card.harm(item)
        self._arrived.put_nowait(item)

    async def read(self, is_wanted: Callable[[], bool]) -> PullReply | bytes:
        """Return what comes next. Raises Cut, or NotWanted."""
        while is_wanted():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    item = await self._arrived.get()
                    if item is None:
                        raise Cut
                    return item
        raise NotWanted

    def tear(self) -> None:
        """End the connection. The source's loan ends, and a reader finds out."""
        if self in self._network.streams:
            self._network.streams.remove(self)
            self._arrived.put_nowait(None)
            if self.serving is not None:
                self.serving.cancel()


class _Bytes:
    """The part of a socket that a Connection uses, with the bytes of one frame."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def gettimeout(self) -> float:
        return 0.0

    def settimeout(self, seconds: float) -> None:
        """Do nothing: all bytes are here."""

    def sendmsg(self, pieces: list[memoryview]) -> int:
        self.data += b"".join(pieces)
        return sum(map(len, pieces))

    def recv_into(self, into: memoryview) -> int:
        count = min(len(into), len(self.data))
        into[:count], self.data = self.data[:count], self.data[count:]
        return count


def _connection(data: _Bytes) -> Connection:
    connection = Connection(data)  # type: ignore[arg-type] # the part of a socket that it uses
    connection.deadline = float("inf")
    return connection


class VirtualExchange:
    """Lends and fetches blocks for one simulated worker."""

    def __init__(
        self,
        network: TransferNetwork,
        *,
        address: str,
        incarnation: str,
        engine: Engine,
        thread: EngineThread,
        service: SessionService,
        memory: TransferableMemory | None = None,
    ) -> None:
        """`address` is that of the worker's session. Without `memory` blocks have no bytes."""
        process = PROCESS.get()
        assert isinstance(process, Process)
        self.process = process
        self.host = address.rpartition(":")[0]
        self._facts = LenderFacts(incarnation=incarnation, layout=LAYOUT, max_blocks=1 << 30)
        self._thread = thread
        self._network = network
        self._engine = engine
        self._service = service
        self._memory = memory
        self._loans = asyncio.Semaphore(MAX_LOANS)
        self._avoided = Avoided()
        network.exchanges[f"{self.host}:{TRANSFER_PORT}"] = self
        engine.pull_rates.answered(network.setup_seconds, int(network.bytes_per_second), 1.0)
        engine.start_pull = self._start_pull

    # The source's half

    async def serve(self, stream: Stream, request: PullRequest) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(request.seconds):
                await self._answer(stream, request)

    async def _answer(self, stream: Stream, request: PullRequest) -> None:
        if refusal := refusal_of(request, self._facts):
            await stream.send(PullReply(refusal=refusal))
            return
        try:
            async with asyncio.timeout(QUEUE_SHARE * request.seconds):
                await self._loans.acquire()
        except TimeoutError:
            await stream.send(PullReply(refusal=PullRefusal.PULL_REFUSAL_BUSY))
            return
        try:
            loan = await self._lend(request)
            try:
                await self._send_blocks(stream, loan)
            finally:
                self._end_loan(loan)
        finally:
            self._loans.release()

    async def _lend(self, request: PullRequest) -> Loan:
        names = [BlockName(name) for name in split_names(request.names)]
        future = self._thread.call(lambda engine: engine.lend(names, first=request.first_block))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                future.add_done_callback(lambda lent: self._end_loan(lent.result()))
            raise

    def _end_loan(self, loan: Loan) -> None:
        self._thread.call(lambda engine: engine.end_loan(loan))

    async def _send_blocks(self, stream: Stream, loan: Loan) -> None:
        await stream.send(PullReply(num_blocks=loan.num_unsent))
        for index in range(len(loan) - loan.num_unsent, len(loan)):
            await stream.send(self._frame(loan, index), self._engine.bytes_per_block)
            loan.num_unsent -= 1
            loan.num_sent += 1

    def _frame(self, loan: Loan, index: int) -> bytes:
        if self._memory is None:
            return struct.pack("<I", index)
        frame = _Bytes()
        _connection(frame).send_block(index, *content_of(self._memory, loan, index))
        return frame.data

    # The destination's half

    def _start_pull(self, pull: Pull) -> None:
        self.process.start(self._run(pull))

    async def _run(self, pull: Pull) -> None:
        attempt = _Attempt(asyncio.get_running_loop().time())
        end = await self._fetch(pull, attempt)
        while self._network.card(self.host).is_stuck:  # noqa: ASYNC110 - a fault may end without an event
            await asyncio.sleep(LOOK_SECONDS)
        if end != PullEnd.PULL_END_WHOLE and self._memory is not None:
            for slot in pull.slots[attempt.num_blocks :][:1]:
                self._memory.slot(slot)[:4] = b"part"  # of the block that was on its way
        result = attempt.result(end, self._engine.bytes_per_block)
        self._network.on_end(self._facts.incarnation, attempt.source, pull, result)
        self._thread.call(lambda engine: self._end(engine, pull, result))

    def _end(self, engine: Engine, pull: Pull, result: PullResult) -> None:
        report = take_pull(engine, pull, result)
        if pull.request_id is not None:
            self._service.pull_ended(pull.request_id, report)

    async def _fetch(self, pull: Pull, attempt: "_Attempt") -> PullEnd:
        loop, address = asyncio.get_running_loop(), pull.order.address
        if self._avoided.holds(address, loop.time()):
            return PullEnd.PULL_END_AVOIDED
        end = PullEnd.PULL_END_LATE
        with suppress(TimeoutError):
            async with asyncio.timeout(pull.order.seconds):
                end = await self._tried(pull, attempt)
        self._avoided.note(address, end, has_answer=attempt.has_answer, now=loop.time())
        return end

    async def _tried(self, pull: Pull, attempt: "_Attempt") -> PullEnd:
        await asyncio.sleep(self._network.setup_seconds)
        source = self._network.exchanges.get(pull.order.address)
        if source is None or not source.process.is_alive:
            return PullEnd.PULL_END_UNREACHABLE
        stream = Stream(self, source, self._network)
        try:
            return await self._exchange(stream, source, pull, attempt)
        except ProtocolError:
            return PullEnd.PULL_END_CORRUPT
        except Cut:
            return PullEnd.PULL_END_CUT
        except NotWanted:
            return PullEnd.PULL_END_CANCELLED
        finally:
            stream.tear()

    async def _exchange(
        self, stream: Stream, source: "VirtualExchange", pull: Pull, attempt: "_Attempt"
    ) -> PullEnd:
        request = PullRequest(
            incarnation=pull.order.incarnation,
            layout=LAYOUT,
            names=b"".join(pull.prefix),
            first_block=len(pull.head),
            seconds=pull.order.seconds - (asyncio.get_running_loop().time() - attempt.began),
        )
        stream.serving = source.process.start(source.serve(stream, request))
        reply = await stream.read(lambda: not pull.is_cancelled)
        assert isinstance(reply, PullReply)
        attempt.source = source._facts.incarnation
        attempt.answered_at = asyncio.get_running_loop().time()
        if reply.refusal:
            return PullEnd.PULL_END_REFUSED
        for number in range(reply.num_blocks):
            frame = await stream.read(lambda: not pull.is_cancelled)
            assert isinstance(frame, bytes)
            self._receive(pull, number, frame)
            attempt.num_blocks += 1
        return PullEnd.PULL_END_WHOLE if reply.num_blocks == len(pull.slots) else PullEnd.PULL_END_FEWER

    def _receive(self, pull: Pull, number: int, frame: bytes) -> None:
        if self._memory is not None:
            slot, left = pull.slots[number], _Bytes(frame)
            checksum = _connection(left).receive_block(len(pull.head) + number, self._memory.slot(slot))
            self._memory.received(slot, checksum)
            if left.data:
                raise ProtocolError("more than a block")  # the next one's header, on a real connection
        pull.num_arrived += 1


@dataclass(slots=True)
class _Attempt:
    """One pull's progress."""

    began: float
    source: str = ""
    """The incarnation that has answered."""
    answered_at: float = 0.0
    num_blocks: int = 0

    @property
    def has_answer(self) -> bool:
        return self.answered_at > 0

    def result(self, end: PullEnd, block_bytes: int) -> PullResult:
        now = asyncio.get_running_loop().time()
        if not self.has_answer:
            return PullResult(end=end, setup_seconds=now - self.began)
        return PullResult(
            end=end,
            num_blocks=self.num_blocks,
            num_bytes=self.num_blocks * block_bytes,
            setup_seconds=self.answered_at - self.began,
            transfer_seconds=now - self.answered_at,
            has_answer=True,
            num_arrived=self.num_blocks,
        )
