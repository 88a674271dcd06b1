"""Engine thread: runs an engine beside an event loop. Commands go in through a queue, results come out by one
callback."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineLoad, StepResult

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    """Runs an engine in a thread of its own while there is work. Commands run between steps."""

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepResult, EngineLoad], None],
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        """Both callbacks run on the engine's thread: `on_step` when anything has changed, `on_death` if a defect ends
        the thread."""
        self._engine = engine
        self._on_step = on_step
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._reported = engine.load()
        self._busy_since: float | None = None
        """When the current step or command began."""

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which the current step or command has run, 0 between them. Any thread may ask."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float | None = None) -> None:
        """End the thread after the current step, and wait for that at most `timeout_seconds`. None waits without
        limit."""
        self._commands.put(None)
        self._engine.wake()
        self._thread.join(timeout_seconds)

    def call(self, command: Callable[[Engine], T]) -> "Future[T]":
        """Queue a command for the engine's thread, which runs it between steps. Return the future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(run)
        self._engine.wake()
        return future

    def _run(self) -> None:
        try:
            self._advance()
        except Exception:
            logger.critical("the engine fails: a defect ended its thread", exc_info=True)
            self._on_death()

    def _advance(self) -> None:
        while self._run_commands():
            if self._engine.has_work:
                self._busy_since = time.monotonic()
                result = self._engine.step()
                self._busy_since = None
            elif self._engine.load() != self._reported:
                # A command ended the last work: the load must not stay as it was.
                result = StepResult(outputs=(), changes=self._engine.cache.take_changes())
            else:
                continue
            self._reported = self._engine.load()
            self._on_step(result, self._reported)

    def _run_commands(self) -> bool:
        """Run the commands that are queued by now, and wait for one when there is no other work. Return False
        once the thread must end.

        Commands that come meanwhile do not delay a step.
        """
        block = not self._engine.has_work
        for _ in range(max(1, self._commands.qsize())):
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._busy_since = time.monotonic()
            command()
            self._busy_since = None
            block = False
        return True
