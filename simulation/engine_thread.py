"""An engine thread without a thread: the interface of EngineThread, and steps that take virtual time.

A step is computed when it begins. Its result is published when it ends. Commands wait until then, as they do for a
thread that computes.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from blockyard.worker.engine import HELD_SECONDS, Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.engine_types import EngineLoad, StepResult

from simulation.virtual_time import VirtualLoop

T = TypeVar("T")


class StepClock:
    """The engine's clock: the loop's time plus what the current step has spent so far."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._ahead_seconds = 0.0

    def __call__(self) -> float:
        return self._loop.time() + self._ahead_seconds

    def spend(self, seconds: float) -> None:
        self._ahead_seconds += seconds

    def take(self) -> float:
        """Return the seconds that the step has spent, and begin at 0 again. The caller moves the loop's clock by as
        much."""
        seconds, self._ahead_seconds = self._ahead_seconds, 0.0
        return seconds


class VirtualEngineThread(EngineThread):
    """An EngineThread whose steps run in `advance`, a task of its worker's process."""

    def __init__(
        self, engine: Engine, on_step: Callable[[StepResult, EngineLoad], None], clock: StepClock
    ) -> None:
        self.busy_seconds = 0.0
        """Virtual time spent in steps."""
        self._engine = engine
        self._on_step = on_step
        self._clock = clock
        self._waiting = deque[Callable[[], None]]()
        self._wake = asyncio.Event()
        self._reported = engine.load()
        self._began: float | None = None
        self._is_stopped = False

    @property
    def stalled_seconds(self) -> float:
        return 0.0 if self._began is None else asyncio.get_running_loop().time() - self._began

    def start(self) -> None:
        """Do nothing: the worker's process starts `advance`."""

    def stop(self, timeout_seconds: float | None = None) -> None:
        self._is_stopped = True
        self._wake.set()

    def call(self, command: Callable[[Engine], T]) -> "Future[T]":
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._waiting.append(run)
        self._wake.set()
        return future

    async def advance(self) -> None:
        while not self._is_stopped:
            while self._waiting:
                self._waiting.popleft()()
            if self._engine.has_work:
                await self._step()
            elif self._engine.load() != self._reported:
                self._report(StepResult(outputs=(), changes=self._engine.cache.take_changes()))
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _step(self) -> None:
        self._began = asyncio.get_running_loop().time()
        self._engine.wake()  # where all wait for pulls or loans, a step would wait in real time
        result = self._engine.step()
        seconds = self._clock.take()
        scheduler = self._engine.scheduler
        if seconds or self._waiting or not (scheduler.pulls or scheduler.tables.num_lent):
            await asyncio.sleep(seconds)
        else:
            await self._wait_for_transfers()
        self.busy_seconds += seconds
        self._began = None
        self._report(result)

    async def _wait_for_transfers(self) -> None:
        """Wait as long as a step would, until a pull or a loan ends or there is another command."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(HELD_SECONDS):
                await self._wake.wait()

    def _report(self, result: StepResult) -> None:
        self._reported = self._engine.load()
        self._on_step(result, self._reported)
