"""Transfers between simulated workers: the exchange of each worker, over links that take virtual time.

A link carries one pull after the other, as a network card does. Lending and caching are the engine's own. What arrives
is decided by time alone. Does not own the bytes: a run whose runners have some says how to copy them.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from blockyard.proto.v1.session_pb2 import PullEnd, PullReport
from blockyard.worker.cache.block_tables import Loan
from blockyard.worker.engine import Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.execution.runner import Runner
from blockyard.worker.scheduling.pulls import Pull
from blockyard.worker.sequences.identifiers import HostSlot
from blockyard.worker.session.session import SessionService

from simulation.virtual_time import PROCESS, Process

TRANSFER_PORT = 1


@dataclass(slots=True, kw_only=True)
class TransferNetwork:
    """All exchanges of one run, by transfer address."""

    bytes_per_second: float
    """Rate of each worker's link, in each direction."""
    setup_seconds: float
    """Time until a source hears of a pull, and until its answer is back."""
    copy: Callable[[Runner, Loan, int, Runner, HostSlot], object] = lambda *block: None
    """Copies the block of this index in a loan from one runner to a slot of another's host memory."""
    exchanges: "dict[str, VirtualExchange]" = field(default_factory=dict)


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
    ) -> None:
        """`address` is that of the worker's session."""
        self.thread = thread
        self.incarnation = incarnation
        self._network = network
        self._engine = engine
        self._service = service
        self._process = PROCESS.get()
        self._lent: set[Loan] = set()
        """Loans that have not ended. Each ends at its deadline, also if the other worker has died."""
        self._free_at = 0.0
        """When the link has carried all that was given to it."""
        network.exchanges[f"{address.rpartition(':')[0]}:{TRANSFER_PORT}"] = self
        engine.pull_rates.answered(network.setup_seconds, int(network.bytes_per_second), 1.0)
        engine.start_pull = self._start_pull

    async def lend(self, pull: Pull) -> Loan:
        """Return the loan of this worker's blocks for a pull of another worker."""
        first = len(pull.head)
        future = self.thread.call(lambda engine: self._lend(engine, pull, first))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                future.add_done_callback(lambda lent: self._end_loan(lent.result()))
            raise

    def _lend(self, engine: Engine, pull: Pull, first: int) -> Loan:
        loan = engine.lend(pull.prefix, first=first)
        self._lent.add(loan)
        assert isinstance(self._process, Process)
        self._process.start(self._end_at_deadline(loan, pull.order.seconds))
        return loan

    async def _end_at_deadline(self, loan: Loan, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._end_loan(loan)

    def _end_loan(self, loan: Loan) -> None:
        self.thread.call(lambda engine: self._end_once(engine, loan))

    def _end_once(self, engine: Engine, loan: Loan) -> None:
        if loan in self._lent:
            self._lent.remove(loan)
            engine.end_loan(loan)

    def _start_pull(self, pull: Pull) -> None:
        assert isinstance(self._process, Process)
        self._process.start(self._run(pull))

    async def _run(self, pull: Pull) -> None:
        loop = asyncio.get_running_loop()
        began, deadline = loop.time(), loop.time() + pull.order.seconds
        report = PullReport(end=PullEnd.PULL_END_LATE)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._fetch(pull, report, began)
        self.thread.call(lambda engine: self._end(engine, pull, report))

    def _end(self, engine: Engine, pull: Pull, report: PullReport) -> None:
        engine.end_pull(pull, report.num_blocks)
        if report.setup_seconds:
            setup_seconds = engine.seconds_since(pull.began) - report.transfer_seconds
            engine.pull_rates.answered(setup_seconds, report.num_bytes, report.transfer_seconds)
        if pull.request_id is not None:
            self._service.pull_ended(pull.request_id, report)

    async def _fetch(self, pull: Pull, report: PullReport, began: float) -> None:
        """Write into the report what has arrived, until everything has or the caller's time is over."""
        loop, network = asyncio.get_running_loop(), self._network
        await asyncio.sleep(network.setup_seconds)
        source = network.exchanges.get(pull.order.address)
        if source is None or source.incarnation != pull.order.incarnation:
            report.end = PullEnd.PULL_END_REFUSED
            return
        loan = await source.lend(pull)
        answered = loop.time()
        report.setup_seconds = answered - began
        try:
            block_seconds = self._engine.bytes_per_block / network.bytes_per_second
            num_blocks = loan.num_unsent
            for number in range(num_blocks):
                free_at = max(self._free_at, source._free_at, loop.time()) + block_seconds
                self._free_at = source._free_at = free_at
                await asyncio.sleep(free_at - loop.time())
                if loan not in source._lent:
                    return  # its deadline has passed
                index = len(loan) - num_blocks + number
                network.copy(source._engine.runner, loan, index, self._engine.runner, pull.slots[number])
                report.num_blocks += 1
                loan.num_unsent -= 1
                loan.num_sent += 1
                pull.num_arrived += 1
                report.num_bytes += self._engine.bytes_per_block
                report.transfer_seconds = loop.time() - answered
                if pull.is_cancelled:
                    report.end = PullEnd.PULL_END_CANCELLED
                    return
            is_whole = num_blocks == len(pull.slots)
            report.end = PullEnd.PULL_END_WHOLE if is_whole else PullEnd.PULL_END_FEWER
        finally:
            source._end_loan(loan)
