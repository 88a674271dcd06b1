"""EngineThread without a thread: the same interface, and steps that take virtual time.

A step is computed when it begins; what it brought is told when it ends, and commands wait until then, as they do for
a thread that computes.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from blockyard.worker.engine import Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.engine_types import EngineLoad, StepResult

from .model import StepClock

T = TypeVar("T")


class EngineTurns(EngineThread):
    """Turned by `turn`, a task of its worker's process."""

    def __init__(
        self, engine: Engine, on_step: Callable[[StepResult, EngineLoad], None], clock: StepClock
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._clock = clock
        self._waiting = deque[Callable[[], None]]()
        self._wake = asyncio.Event()
        self._told = engine.load()
        self._began: float | None = None
        self._is_stopped = False

    @property
    def stalled_seconds(self) -> float:
        return 0.0 if self._began is None else asyncio.get_running_loop().time() - self._began

    def start(self) -> None:
        """`turn` is started by the process."""

    def stop(self) -> None:
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

    async def turn(self) -> None:
        while not self._is_stopped:
            while self._waiting:
                self._waiting.popleft()()
            if self._engine.has_work:
                await self._step()
            elif self._engine.load() != self._told:
                self._tell(StepResult(outputs=(), changes=self._engine.cache.take_changes()))
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _step(self) -> None:
        self._began = asyncio.get_running_loop().time()
        result = self._engine.step()
        await asyncio.sleep(self._clock.take())
        self._began = None
        self._tell(result)

    def _tell(self, result: StepResult) -> None:
        self._told = self._engine.load()
        self._on_step(result, self._told)
