"""Exchange: lends and fetches blocks for one engine, by a lender and a receiver."""

import ssl
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from blockyard.proto.v1.session_pb2 import PullReport
from blockyard.worker.cache.block_tables import Loan
from blockyard.worker.engine import Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.memory.transferable import TransferableMemory
from blockyard.worker.scheduling.pulls import Pull, PullOrder
from blockyard.worker.sequences.identifiers import BlockName, RequestId, TenantId
from blockyard.worker.transfer.lender import Fence, Lender
from blockyard.worker.transfer.neighbours import Neighbours
from blockyard.worker.transfer.nixl import NixlAgent
from blockyard.worker.transfer.receiver import Receiver
from blockyard.worker.transfer.rules import (
    LenderFacts,
    PullResult,
    layout_of,
    take_measurement,
    take_pull,
)


class Exchange:
    """The transfers of one worker, from `start` to `stop`."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        memory: TransferableMemory,
        *,
        incarnation: str,
        model_fingerprint: str,
        context: Callable[[bool], ssl.SSLContext] | None,
        neighbours: Neighbours | None,
        on_pull_end: Callable[[RequestId, PullReport], object],
        nixl: bool = False,
    ) -> None:
        """`engine` does not run yet. `on_pull_end` is called on the engine's thread. `context` makes TLS contexts, None
        means plaintext. Without `neighbours` all connections are TCP. With `nixl` blocks are read by it where the other
        worker has it too. Raises ValueError where it is not installed, or blocks are on a GPU."""
        self._can_pull = engine.scheduler.host_cache is not None
        self._thread = thread
        self._memory = memory
        self._on_pull_end = on_pull_end
        config = engine.scheduler.config
        layout = layout_of(model_fingerprint, memory)
        agent = _agent(incarnation, memory) if nixl else None
        self._lender = Lender(
            LenderFacts(
                incarnation=incarnation,
                layout=layout,
                max_blocks=config.max_model_len // config.block_size,
            ),
            memory,
            lend=self._lend,
            end_loan=lambda loan: self._thread.call(lambda engine: engine.end_loan(loan)),
            context=context,
            neighbours=neighbours,
            nixl=agent,
        )
        self._receiver = Receiver(
            layout,
            memory,
            context=context,
            neighbours=neighbours,
            on_end=self._end_pull,
            on_trial_end=self._end_trial,
            nixl=agent,
        )
        engine.start_pull = self._start_pull
        self._ordered: dict[Pull, Future[PullReport]] = {}
        """The reports that operators wait for. Changed on the engine's thread."""

    def start(self, host: str, port: int) -> int:
        """Listen for other workers, and return the port. Raises OSError where that is not possible."""
        return self._lender.start(host, port)

    @property
    def lends_nothing_for_seconds(self) -> float:
        """Seconds since another worker was last answered. 0 while one is."""
        return self._lender.quiet_seconds

    def stop(self) -> None:
        """End all transfers. The engine still runs."""
        self._lender.stop()
        self._receiver.stop()

    def measure(self, address: str, incarnation: str) -> None:
        """Measure the link from a worker, unless that is known. An engine without host memory can fetch nothing."""
        if self._can_pull:
            self._receiver.measure(address, incarnation)

    def order(
        self, names: list[BlockName], order: PullOrder, tenant: TenantId
    ) -> "Future[tuple[Future[PullReport] | None, int]]":
        """Fetch a prefix for which no request waits, and return a future of two values.

        They are the future of its report, None where all of it is here, and the number of blocks that are here.
        The first future may have NoHostMemory, PullsBusy or UnderWay.
        """

        def begin(engine: Engine) -> tuple[Future[PullReport] | None, int]:
            pull, num_here = engine.order_pull(names, order, tenant)
            if pull is None:
                return None, num_here
            return self._ordered.setdefault(pull, Future()), num_here

        return self._thread.call(begin)

    def _lend(self, names: list[BlockName], first: int) -> "Future[tuple[Loan, Fence]]":
        return self._thread.call(lambda engine: (engine.lend(names, first=first), self._memory.fence()))

    def _start_pull(self, pull: Pull) -> None:
        self._receiver.start(pull, self._memory.fence())

    def _end_pull(self, pull: Pull, result: PullResult) -> None:
        self._thread.call(partial(self._take, pull, result))

    def _end_trial(self, result: PullResult) -> None:
        self._thread.call(lambda engine: take_measurement(engine, result, setup_seconds=result.setup_seconds))

    def _take(self, pull: Pull, result: PullResult, engine: Engine) -> None:
        report = take_pull(engine, pull, result)
        if pull.request_id is not None:
            self._on_pull_end(pull.request_id, report)
        else:
            self._ordered.pop(pull).set_result(report)


def _agent(incarnation: str, memory: TransferableMemory) -> NixlAgent:
    if not memory.is_in_place:
        raise ValueError("--nixl takes blocks in the CPU's memory alone; blocks of a GPU go over TCP")
    return NixlAgent(incarnation, memory.regions(), memory.block_bytes)
