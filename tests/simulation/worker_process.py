"""One life of a worker: the real session service, engine and publisher, in a simulated process.

Puts together what worker/server.py does, without a server and a thread.
"""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass

from blockyard.proto.prefix_index import Incarnation, WorkerId, WorkerRecord
from blockyard.proto.v1.cluster_pb2 import WorkerIndex
from blockyard.proto.v1.session_pb2 import Hello
from blockyard.worker.administration import Administration
from blockyard.worker.draining import DrainTakenBack
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import StepResult
from blockyard.worker.index_report import index_message
from blockyard.worker.pool_view import load_message
from blockyard.worker.publisher import IndexPublisher
from blockyard.worker.publisher_state import PublisherConfig
from blockyard.worker.scheduler import SchedulerConfig
from blockyard.worker.session import SessionService

from .calls import Connections, Listener
from .engine_turns import EngineTurns
from .index_access import IndexServer, RemoteIndex
from .model import VOCABULARY, DigestRunner, StepClock
from .virtual_time import Process, VirtualLoop

SECRET = "a-cluster-secret"
LEASE_SECONDS = 1.0
TOKENIZER = "tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What all workers of a run have in common."""

    scheduler: SchedulerConfig
    num_blocks: int
    step_seconds: float
    prefill_tokens_per_second: float
    max_waiting: int


class WorkerProcess:
    """To be made on the loop; serves from `start`."""

    def __init__(
        self,
        name: str,
        life: int,
        address: str,
        setup: WorkerSetup,
        loop: VirtualLoop,
        connections: Connections,
        index: IndexServer,
        rng: random.Random,
    ) -> None:
        self.name, self.address = name, address
        self.incarnation = f"{name}#{life}"
        self.process = Process(self.incarnation, loop)
        self._connections = connections
        self._setup = setup
        clock = StepClock(loop)
        self.runner = DigestRunner(
            clock,
            step_seconds=setup.step_seconds,
            prefill_tokens_per_second=setup.prefill_tokens_per_second,
        )
        self.engine = Engine(
            setup.scheduler,
            self.runner,
            num_blocks=setup.num_blocks,
            mixed_step_seconds=0.02,
            clock=clock,
        )
        self.runner.prepare(self.engine)
        self.publisher = IndexPublisher(
            RemoteIndex(index),
            WorkerRecord(
                worker_id=WorkerId(name),
                incarnation=Incarnation(self.incarnation),
                address=address,
                fingerprint="model",
                block_size=setup.scheduler.block_size,
            ),
            config=PublisherConfig(lease_seconds=LEASE_SECONDS),
            has_host_cache=setup.scheduler.host_cache_blocks > 0,
            clock=loop.time,
            rng=rng,
        )
        self.service: SessionService
        self.administration: Administration
        self._clock = clock
        self._turns: EngineTurns

    def start(self) -> None:
        self.process.start(self._serve())

    async def _serve(self) -> None:
        self.service = SessionService(
            hello=self._hello(),
            vocab_size=VOCABULARY,
            max_waiting=self._setup.max_waiting,
        )
        self._turns = EngineTurns(self.engine, self.service.on_step, self._clock)
        self.service.attach(self._turns, self.engine.load())
        self.service.on_changes = self._publish
        self.service.index_part = self._index_part
        self.administration = Administration(service=self.service, engine=self._turns)
        self.administration.index = self.publisher
        handler = self.service.handler(self.administration.methods())
        self._connections.listeners[self.address] = Listener(self.process, handler)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._turns.turn())
            tasks.create_task(self.publisher.run())

    @property
    def is_serving(self) -> bool:
        """Its process has got so far."""
        return self.address in self._connections.listeners

    @property
    def stalled_seconds(self) -> float:
        """Of the step under way, which may be one of a slow time that is over."""
        return self._turns.stalled_seconds

    def is_idle(self) -> bool:
        """Nothing is held for any request."""
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
        self._turns.call(lambda engine: engine.flush())

    def rebuild(self) -> None:
        self.process.start(self._rebuild())

    async def _rebuild(self) -> None:
        self.publisher.rebuild()

    def leave(self) -> asyncio.Task[None]:
        """The end of a worker that has drained, or of one in a cluster that ends."""
        return self.process.start(self._leave())

    async def _leave(self) -> None:
        await self.publisher.close()
        self._connections.listeners.pop(self.address, None)
        self.service.end_streams()
        self._turns.stop()

    def _hello(self) -> Hello:
        config = self._setup.scheduler
        return Hello(
            worker_id=self.name,
            incarnation=self.incarnation,
            model_fingerprint="model",
            tokenizer_fingerprint=TOKENIZER,
            block_size=config.block_size,
            kv_dtype="digests",
            total_blocks=self._setup.num_blocks,
            max_model_len=config.max_model_len,
            vocab_size=VOCABULARY,
            load=load_message(self.engine.load()),
            max_waiting=self._setup.max_waiting,
            index_stride_blocks=config.index_stride_blocks,
        )

    def _publish(self, result: StepResult) -> None:
        self.publisher.record(*result.changes)

    def _index_part(self) -> WorkerIndex:
        return index_message(self.publisher.state())
