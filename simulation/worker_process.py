"""One incarnation of a worker: the real session service, engine and publisher, in a simulated process.

Joins them as worker/server.py does, without a server and a thread. Does not own the runner, which says what a step
computes and how long it takes.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from blockyard.proto.index.contract import Incarnation, WorkerId, WorkerRecord
from blockyard.proto.roles import Role
from blockyard.proto.v1.cluster_pb2 import WorkerIndex
from blockyard.proto.v1.session_pb2 import Hello
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import StepResult
from blockyard.worker.execution.runner import Runner
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import index_message
from blockyard.worker.indexing.sharded_publisher import ShardedPublisher
from blockyard.worker.indexing.state import PublisherConfig
from blockyard.worker.inspection.pool_view import load_message
from blockyard.worker.memory.transferable import TransferableMemory
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.adapter import Adapter
from blockyard.worker.session.administration import Administration
from blockyard.worker.session.draining import DrainTakenBack
from blockyard.worker.session.session import SessionService
from blockyard.worker.simulated.memory import SIMULATED
from blockyard.worker.startup.warm_up import try_out

from simulation.calls import Connections, Listener
from simulation.engine_thread import StepClock, VirtualEngineThread
from simulation.index_access import IndexServer, RemoteIndex
from simulation.transfers import TRANSFER_PORT, TransferNetwork, VirtualExchange
from simulation.virtual_time import Process, VirtualLoop

SECRET = "a-cluster-secret"
TOKENIZER = "tokenizer"
RunnerT = TypeVar("RunnerT", bound=Runner)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup(Generic[RunnerT]):
    """Settings that all workers of a run share."""

    scheduler: SchedulerConfig
    num_blocks: int
    make_runner: Callable[[StepClock], RunnerT]
    vocab_size: int
    max_waiting: int
    mixed_step_seconds: float | None
    lease_seconds: float = PublisherConfig().lease_seconds
    bytes_per_block: int = 0
    swap_blocks_per_second: float = 0.0
    """Round trips of blocks to host memory and back."""
    transfers: TransferNetwork | None = None
    """How workers fetch blocks from one another. None: they do not."""
    memory_of: Callable[[RunnerT], TransferableMemory] | None = None
    """The bytes of a runner's blocks, for transfers. None: blocks have none."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters that each worker has in host memory from the start."""
    measures_rates: bool = False
    """Whether the engine runs a trial before the first request, as on a real worker. The trial takes no virtual
    time."""


class WorkerProcess(Generic[RunnerT]):
    """A worker. Create it on the loop. It serves from `start` on."""

    def __init__(
        self,
        name: str,
        number: int,
        address: str,
        setup: WorkerSetup[RunnerT],
        loop: VirtualLoop,
        connections: Connections,
        index: IndexServer,
        rng: random.Random,
        *,
        role: Role = "both",
    ) -> None:
        """Create a worker. `number` counts the incarnations of this name."""
        self.name, self.address, self._role = name, address, role
        self.incarnation = f"{name}#{number}"
        self.process = Process(self.incarnation, loop)
        self._connections = connections
        self._setup = setup
        self._clock = StepClock(loop)
        self.runner = setup.make_runner(self._clock)
        self.engine = Engine(
            setup.scheduler,
            self.runner,
            num_blocks=setup.num_blocks,
            bytes_per_block=setup.bytes_per_block,
            mixed_step_seconds=setup.mixed_step_seconds,
            swap_blocks_per_second=setup.swap_blocks_per_second,
            clock=self._clock,
        )
        for adapter in setup.adapters:
            self.engine.adapters.add(adapter)
        if setup.measures_rates:
            try_out(self.engine)
            self._clock.take()
        self.publisher = IndexPublisher(
            RemoteIndex(index),
            WorkerRecord(
                worker_id=WorkerId(name),
                incarnation=Incarnation(self.incarnation),
                address=address,
                fingerprint="model",
                block_size=setup.scheduler.block_size,
            ),
            config=PublisherConfig(lease_seconds=setup.lease_seconds),
            has_host_cache=setup.scheduler.host_cache_blocks > 0,
            clock=loop.time,
            rng=rng,
        )
        self.service: SessionService
        self.administration: Administration
        self._thread: VirtualEngineThread

    def start(self) -> None:
        self.process.start(self._serve())

    async def _serve(self) -> None:
        self.service = SessionService(
            hello=self._hello(), vocab_size=self._setup.vocab_size, max_waiting=self._setup.max_waiting
        )
        self._thread = VirtualEngineThread(self.engine, self.service.on_step, self._clock)
        if self._setup.transfers is not None:
            VirtualExchange(
                self._setup.transfers,
                address=self.address,
                incarnation=self.incarnation,
                engine=self.engine,
                thread=self._thread,
                service=self.service,
                memory=None if self._setup.memory_of is None else self._setup.memory_of(self.runner),
            )
        self.service.attach(self._thread, self.engine.load())
        self.service.on_changes = self._publish
        self.service.index_part = self._index_part
        self.administration = Administration(service=self.service, engine=self._thread)
        self.administration.index = ShardedPublisher([self.publisher])
        handler = self.service.handler(self.administration.methods())
        self._connections.listeners[self.address] = Listener(self.process, handler)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._thread.advance())
            tasks.create_task(self.publisher.run())

    @property
    def is_serving(self) -> bool:
        """Return whether the worker's process listens at its address."""
        return self.address in self._connections.listeners

    @property
    def stalled_seconds(self) -> float:
        """Return how long the current step has run. The step may have begun while the worker was slow."""
        return self._thread.stalled_seconds

    @property
    def busy_seconds(self) -> float:
        return self._thread.busy_seconds

    def is_idle(self) -> bool:
        """Return whether the worker holds nothing for any request."""
        engine = self.engine
        return not engine.has_work and not engine.pool.num_used and not self.service._routes

    def drain(self, grace_seconds: float) -> asyncio.Task[None]:
        return self.process.start(self._drain(grace_seconds))

    async def _drain(self, grace_seconds: float) -> None:
        with suppress(DrainTakenBack):
            await self.administration.draining.drain(grace_seconds)

    def resume(self) -> None:
        self.process.start(self._resume())

    async def _resume(self) -> None:
        self.administration.draining.resume()

    def flush(self) -> None:
        self._thread.call(lambda engine: engine.flush())

    def rebuild(self) -> None:
        self.process.start(self._rebuild())

    async def _rebuild(self) -> None:
        self.publisher.rebuild()

    def leave(self) -> asyncio.Task[None]:
        """End a worker that has drained, or one whose cluster ends: leave the index, close its calls and stop its
        engine."""
        return self.process.start(self._leave())

    async def _leave(self) -> None:
        await self.publisher.close()
        self._connections.listeners.pop(self.address, None)
        self.service.end_streams()
        self._thread.stop()

    def _hello(self) -> Hello:
        config = self._setup.scheduler
        return Hello(
            worker_id=self.name,
            incarnation=self.incarnation,
            model_fingerprint="model",
            tokenizer_fingerprint=TOKENIZER,
            block_size=config.block_size,
            kv_dtype="simulated",
            total_blocks=self._setup.num_blocks,
            max_model_len=config.max_model_len,
            vocab_size=self._setup.vocab_size,
            load=load_message(self.engine.load()),
            max_waiting=self._setup.max_waiting,
            index_stride_blocks=config.index_stride_blocks,
            transfer_port=TRANSFER_PORT if self._setup.transfers is not None else 0,
            block_bytes=self._setup.bytes_per_block,
            role=self._role,
            max_loras=config.max_loras,
            kv_layout=SIMULATED.layout,
            kv_arithmetic=SIMULATED.arithmetic,
        )

    def _publish(self, result: StepResult) -> None:
        self.publisher.record(*result.changes[:4])

    def _index_part(self) -> WorkerIndex:
        return index_message(self.publisher.state())
