"""A worker in virtual time: the real engine, and around it what a worker server does, without threads or gRPC.

Owns the rhythm of steps, the short queue, and when reports and news of the cache leave. Does not own what a step costs
(profile.py) nor who listens (routers.py, through `Listener`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from blockyard.deploy.bench.requests import PlannedRequest
from blockyard.proto.block_hash import root_name
from blockyard.proto.prefix_index import (
    FIRST_SEQUENCE,
    MAX_BATCH_NAMES,
    ApplyResult,
    Incarnation,
    PrefixIndex,
    WorkerId,
    WorkerRecord,
)
from blockyard.proto.v1 import session_pb2
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest, SequenceOutput, StepResult
from blockyard.worker.net_difference import TieredDifference
from blockyard.worker.pool_view import load_message
from blockyard.worker.publisher_state import PublisherConfig
from blockyard.worker.scheduler import SchedulerConfig
from blockyard.worker.sequence import BlockName, RequestId, SamplingParams
from blockyard.worker.session import LOAD_REPORT_SECONDS
from blockyard.worker.trial import try_out

from bench.simulation.clock import Events, VirtualClock, answer
from bench.simulation.profile import HardwareProfile, RooflineRunner

NETWORK_SECONDS = 0.0005
"""One way between a router and a worker."""
LEASE_SECONDS = 1e9
"""Nobody dies here."""
ROOT = root_name(cluster_secret="", model_fingerprint="simulated", block_size=0, kv_dtype="")


class Listener(Protocol):
    """A router, as a worker sees it."""

    def report(self, address: str, load: object) -> None: ...

    def output(self, number: int, output: SequenceOutput) -> None: ...

    def refused(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request on its way to a worker."""

    request: PlannedRequest
    names: list[bytes]
    token_ids: list[int]
    listener: Listener


class SimulatedWorker:
    """One GPU. Everything happens in events."""

    def __init__(
        self,
        number: int,
        profile: HardwareProfile,
        clock: VirtualClock,
        events: Events,
        index: PrefixIndex,
        *,
        max_waiting: int,
    ) -> None:
        self.address = f"worker-{number}:1"
        self.worker_id = WorkerId(f"worker-{number}")
        self.busy_seconds = 0.0
        self.num_requests = 0
        self._clock, self._events, self._index = clock, events, index
        self._max_waiting = max_waiting
        self.engine = Engine(
            SchedulerConfig(
                block_size=profile.block_size,
                max_num_seqs=profile.max_num_seqs,
                max_num_batched_tokens=profile.max_num_batched_tokens,
                max_model_len=profile.max_model_len,
            ),
            RooflineRunner(profile, clock),
            num_blocks=profile.num_blocks,
            mixed_step_seconds=profile.mixed_step_seconds,
            clock=clock,
        )
        # As a worker does before it is READY: rates are its own from the first request on. It takes no time here.
        start = clock.now
        try_out(self.engine)
        clock.now = start
        self._listeners: list[Listener] = []
        self._reported_at: dict[Listener, float] = {}
        self._routes: dict[RequestId, Submission] = {}
        self._is_stepping = self._will_report = self._will_flush = False
        self._difference = TieredDifference()
        self._sequence = FIRST_SEQUENCE
        self._berth = answer(index.register(self._record(profile), lease_seconds=LEASE_SECONDS))

    def _record(self, profile: HardwareProfile) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            incarnation=Incarnation("1"),
            address=self.address,
            fingerprint="simulated",
            block_size=profile.block_size,
        )

    def hello(self) -> session_pb2.Hello:
        return session_pb2.Hello(
            worker_id=self.worker_id,
            incarnation="1",
            model_fingerprint="simulated",
            block_size=self.engine.scheduler.config.block_size,
            total_blocks=self.engine.pool.num_blocks,
            max_model_len=self.engine.scheduler.config.max_model_len,
            vocab_size=2**31 - 1,
            max_waiting=self._max_waiting,
            load=load_message(self.engine.load()),
        )

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)
        self._reported_at[listener] = self._clock.now

    @property
    def is_idle(self) -> bool:
        return not self.engine.has_work

    def is_crowded(self, num_sequences: int) -> bool:
        """Somebody waits, or so many run."""
        scheduler = self.engine.scheduler
        return bool(scheduler.waiting) or len(scheduler.running) >= num_sequences

    def submit(self, submission: Submission) -> None:
        """Arrives now; refused where the short queue is full."""
        if len(self.engine.scheduler.waiting) >= self._max_waiting:
            number = submission.request.number
            self._events.after(NETWORK_SECONDS, lambda: submission.listener.refused(number))
            return
        self.num_requests += 1
        request = submission.request
        engine_request = EngineRequest(
            token_ids=submission.token_ids,
            prompt_length=len(submission.token_ids),
            names=[BlockName(ROOT), *map(BlockName, submission.names)],
            sampling=SamplingParams(
                max_tokens=request.output.length, seed=request.output.base - request.prompt_tokens
            ),
        )
        self._routes[self.engine.submit(engine_request)] = submission
        self._report_soon()
        self._step_soon()

    def _step_soon(self) -> None:
        """Steps follow each other; what arrives meanwhile waits for the next."""
        if not self._is_stepping and self.engine.has_work:
            self._is_stepping = True
            self._events.after(0.0, self._step)

    def _step(self) -> None:
        """The engine moves the clock while it steps; what came of it is heard of when the step is over."""
        start = self._clock.now
        result = self.engine.step()
        end, self._clock.now = self._clock.now, start
        self.busy_seconds += end - start
        self._events.at(end, lambda: self._end_step(result))

    def _end_step(self, result: StepResult) -> None:
        self._is_stepping = False
        changes = result.changes
        self._difference.on_gpu.record(changes.stored, changes.removed)
        if self._difference and not self._will_flush:
            self._will_flush = True
            self._events.after(PublisherConfig().flush_seconds, self._flush)
        outputs = [(self._routes[output.request_id], output) for output in result.outputs]
        for _, output in outputs:
            if output.is_last:
                del self._routes[output.request_id]
        told = [submission.listener for submission, _ in outputs]
        self._events.after(NETWORK_SECONDS, self._delivery(outputs, self._report_to(set(told))))
        self._report_soon()
        self._step_soon()

    def _delivery(
        self, outputs: list[tuple[Submission, SequenceOutput]], reports: Callable[[], None]
    ) -> Callable[[], None]:
        def deliver() -> None:
            reports()
            for submission, output in outputs:
                submission.listener.output(submission.request.number, output)

        return deliver

    def _report_to(self, listeners: set[Listener]) -> Callable[[], None]:
        load = load_message(self.engine.load())
        chosen = [listener for listener in self._listeners if listener in listeners]
        for listener in chosen:
            self._reported_at[listener] = self._clock.now

        def report() -> None:
            for listener in chosen:
                listener.report(self.address, load)

        return report

    def _report_soon(self) -> None:
        """Routers without tokens in a step hear of changes each 50 ms."""
        if not self._will_report:
            self._will_report = True
            self._events.after(LOAD_REPORT_SECONDS, self._report_to_the_others)

    def _report_to_the_others(self) -> None:
        self._will_report = False
        before = self._clock.now - LOAD_REPORT_SECONDS
        late = {listener for listener, at in self._reported_at.items() if at <= before}
        self._events.after(NETWORK_SECONDS, self._report_to(late))

    def _flush(self) -> None:
        self._will_flush = False
        while self._difference:
            batch = self._difference.take(MAX_BATCH_NAMES, sequence=self._sequence)
            applied = answer(self._index.apply(self._berth, batch))
            assert applied is ApplyResult.OK
            self._sequence += 1
