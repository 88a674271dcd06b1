"""The engine: scheduler, pool, prefix cache and runner in one loop body, and a thread that turns it.

`Engine` is synchronous and owned by one thread; it needs no Ray, Redis or gRPC. `EngineThread` runs it beside an event
loop: commands go in through a queue, what each step brought comes out through one callback.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from blockyard.worker.block_pool import BlockPool
from blockyard.worker.prefix_cache import CacheChanges, PrefixCache
from blockyard.worker.runner import Runner
from blockyard.worker.scheduler import Scheduler, SchedulerConfig, SequenceUpdate
from blockyard.worker.sequence import (
    BlockName,
    FinishReason,
    SamplingParams,
    Sequence,
    SequenceId,
    SequenceState,
    StepPlan,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
RATE_SMOOTHING = 0.2
"""Weight of the newest step in the measured rates."""
MIN_MEASURED_PREFILL_TOKENS = 64
"""A smaller prefill measures the overhead of a step, not the rate."""
MAX_FAILED_STEPS_IN_A_ROW = 3
"""After so many the device, not a request, is what fails: the engine ends, and its worker is started afresh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What to run. `token_ids` is the prompt, then tokens generated before a replay."""

    token_ids: list[int]
    prompt_length: int
    names: list[BlockName]
    """The root's name, then those of the prompt's full blocks (they may stop short: the rest is computed)."""
    sampling: SamplingParams
    deadline_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one step brought one sequence."""

    sequence_id: SequenceId
    token: int | None
    token_offset: int
    """Tokens generated before this one."""
    cached_tokens: int
    state: SequenceState
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    expired: bool = False
    """The deadline passed: nobody waits for the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    outputs: tuple[SequenceOutput, ...]
    changes: CacheChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What routers place by, and operators look at. Counters are since the engine's start."""

    running: int
    waiting: int
    queued_prefill_tokens: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0


class EngineFailed(RuntimeError):
    """Every step fails; this engine serves nobody any more."""


class Engine:
    """One model over one pool. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        *,
        num_blocks: int,
        bytes_per_block: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(config, self.pool, self.cache)
        self.runner = runner
        self.bytes_per_block = bytes_per_block
        self.sequences: dict[SequenceId, Sequence] = {}
        self._clock = clock
        self._next_id = 0
        self._counters = _Counters()
        self._failed_steps_in_a_row = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: EngineRequest) -> SequenceId:
        """Queues a request. Raises CapacityError where it can never fit, ValueError for an empty prompt."""
        if not 0 < request.prompt_length <= len(request.token_ids):
            raise ValueError(f"a prompt of {request.prompt_length} tokens in {len(request.token_ids)}")
        sequence = Sequence(
            sequence_id=SequenceId(self._next_id),
            tokens=list(request.token_ids),
            prompt_length=request.prompt_length,
            sampling=request.sampling,
            names=list(request.names),
            arrival=self._next_id,
            deadline=None if request.deadline_seconds is None else self._clock() + request.deadline_seconds,
        )
        self.scheduler.submit(sequence)
        self._next_id += 1
        self.sequences[sequence.sequence_id] = sequence
        return sequence.sequence_id

    def cancel(self, sequence_id: SequenceId) -> None:
        """Ends a sequence in any state; unknown or over, nothing happens. No output follows."""
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is not None:
            self.scheduler.cancel(sequence)

    def step(self) -> StepResult:
        """Plans, runs and commits one step. A step that raises ends its own sequences as FAILED, and is logged.

        Raises EngineFailed at the beginning of a step after MAX_FAILED_STEPS_IN_A_ROW that raised.
        """
        if self._failed_steps_in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
            raise EngineFailed(f"{self._failed_steps_in_a_row} steps in a row have failed")
        expired = self._expire()
        plan = self.scheduler.plan()
        started = self._clock()
        try:
            tokens = self.runner.execute(plan) if plan.rows else []
        except Exception:
            logger.exception("step %d failed; its %d requests end", plan.step, len(plan.rows))
            updates = self.scheduler.fail(plan)
            self._failed_steps_in_a_row += 1
        else:
            if plan.rows:
                self._failed_steps_in_a_row = 0
            updates = self.scheduler.commit(plan, tokens)
            self._measure(plan, self._clock() - started)
        outputs = (*expired, *(self._output(update) for update in updates))
        return StepResult(outputs=outputs, changes=self.cache.take_changes())

    def _expire(self) -> list[SequenceOutput]:
        now = self._clock()
        late = [s for s in self.sequences.values() if s.deadline is not None and s.deadline <= now]
        for sequence in late:
            self.scheduler.cancel(sequence)
        return [self._output(SequenceUpdate(sequence=s, token=None), expired=True) for s in late]

    def _output(self, update: SequenceUpdate, *, expired: bool = False) -> SequenceOutput:
        sequence = update.sequence
        cached = sequence.cached_tokens or 0
        if update.token is not None:
            self._counters.generated_tokens += 1
            if len(sequence.tokens) == sequence.prompt_length + 1:
                self._counters.prompt_tokens += sequence.prompt_length
                self._counters.cached_tokens += cached
        if sequence.is_over:
            self.sequences.pop(sequence.sequence_id, None)
        return SequenceOutput(
            sequence_id=sequence.sequence_id,
            token=update.token,
            token_offset=sequence.num_generated - (update.token is not None),
            cached_tokens=cached,
            state=sequence.state,
            finish_reason=sequence.finish_reason,
            stop_token=sequence.stop_token,
            expired=expired,
        )

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        prefill = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        decodes = sum(row.num_tokens == 1 for row in plan.rows)
        if seconds <= 0:
            return
        counters = self._counters
        if prefill >= MIN_MEASURED_PREFILL_TOKENS:
            rate = plan.num_tokens / seconds
            counters.prefill_tokens_per_second = _smooth(counters.prefill_tokens_per_second, rate)
        elif decodes and not prefill:
            counters.decode_tokens_per_second = _smooth(counters.decode_tokens_per_second, decodes / seconds)

    def load(self) -> EngineLoad:
        counters = self._counters
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            queued_prefill_tokens=self.scheduler.queued_prefill_tokens,
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            used_blocks=self.pool.num_used,
            prefill_tokens_per_second=counters.prefill_tokens_per_second,
            decode_tokens_per_second=counters.decode_tokens_per_second,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=self.scheduler.num_preemptions,
        )


def _smooth(old: float, new: float) -> float:
    return new if not old else old + RATE_SMOOTHING * (new - old)


class EngineThread:
    """Turns an engine in a thread of its own, as long as there is work; commands run between steps."""

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepResult, EngineLoad], None],
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        """Both are called on the engine's thread: `on_step` when anything has changed, `on_death` if a defect
        ends the thread."""
        self._engine = engine
        self._on_step = on_step
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._reported = engine.load()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step."""
        self._commands.put(None)
        self._thread.join()

    def call(self, command: Callable[[Engine], T]) -> "Future[T]":
        """Runs a command on the engine's thread, between steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(run)
        return future

    def _run(self) -> None:
        try:
            self._turn()
        except Exception:
            logger.critical("a defect ends the engine", exc_info=True)
            self._on_death()

    def _turn(self) -> None:
        while self._run_commands():
            if self._engine.has_work:
                result = self._engine.step()
            elif self._engine.load() != self._reported:
                # A command ended the last work: nobody must go on believing in it.
                result = StepResult(outputs=(), changes=self._engine.cache.take_changes())
            else:
                continue
            self._reported = self._engine.load()
            self._on_step(result, self._reported)

    def _run_commands(self) -> bool:
        """Runs what is queued, waiting for a command when there is no other work. False once told to stop."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            block = False
