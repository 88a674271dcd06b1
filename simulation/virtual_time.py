"""An event loop without real time, threads or sockets: its clock jumps to the next timer.

A `Process` stands for an operating system's process. Every task started in its context belongs to it, with its
callbacks and timers. `freeze` stops all of them (SIGSTOP). `thaw` runs what came due meanwhile, in order. After `kill`
nothing of it runs, not even a `finally`. Does not own what processes do.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context, ContextVar, copy_context
from enum import Enum, auto
from functools import wraps
from typing import Any

START_SECONDS = 1000.0
MAX_TICKS_AT_ONCE = 100_000
OUTSIDE = Context()
"""The context of code that belongs to no process: the network, the plan of a run."""


class ProcessState(Enum):
    RUNNING = auto()
    FROZEN = auto()
    DEAD = auto()


class Stalled(AssertionError):
    """Raised if a task waits without any timer left, or callbacks run without end while no time passes."""


class Process:
    """A simulated process of one VirtualLoop. Its name is unique there."""

    def __init__(self, name: str, loop: "VirtualLoop") -> None:
        self.name = name
        self.state = ProcessState.RUNNING
        self.held: list[asyncio.Handle] = []
        """Callbacks that came due since the process was frozen or killed."""
        self.failures: list[str] = []
        """Errors of the process's tasks that nothing caught."""
        self._loop = loop
        self._corpses: list[asyncio.Task[Any]] = []
        """Tasks of a killed process, kept from the garbage collector, which would run their `finally` clauses."""

    def __repr__(self) -> str:
        return self.name

    @property
    def is_alive(self) -> bool:
        return self.state is not ProcessState.DEAD

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        context = copy_context()
        context.run(PROCESS.set, self)
        task = self._loop.create_task(work, context=context)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(repr(error))

    def tasks(self) -> list[asyncio.Task[Any]]:
        return [t for t in asyncio.all_tasks(self._loop) if isinstance(t, _Task) and t.process is self]

    def freeze(self) -> None:
        assert self.state is ProcessState.RUNNING
        self.state = ProcessState.FROZEN
        self._loop.sift()

    def thaw(self) -> None:
        """Run what came due while it was frozen. Does nothing to a process that was killed meanwhile."""
        if self.state is ProcessState.FROZEN:
            self.state = ProcessState.RUNNING
            self._release()

    def kill(self) -> None:
        self._corpses = self.tasks()
        self.state = ProcessState.DEAD
        self._loop.sift()

    def bury(self) -> list[asyncio.Task[Any]]:
        """Release what was held back, and return the tasks of a killed process, so that the caller can end them after a
        run."""
        self.state = ProcessState.RUNNING
        self._release()
        return self._corpses

    def _release(self) -> None:
        held, self.held = self.held, []
        for handle in held:
            self._loop.resume(handle)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Ready(deque[asyncio.Handle]):
    """The loop's queue of callbacks to run next. It holds back those of a process that is frozen or dead."""

    def append(self, handle: asyncio.Handle, /) -> None:
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None or process.state is ProcessState.RUNNING:
            super().append(handle)
        else:
            process.held.append(handle)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that is its own selector: waiting moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self._now = START_SECONDS
        self._clock_resolution = 1e-9
        self._ready: deque[asyncio.Handle] = deque()
        self._selector = self
        self._is_to_sift = False
        self.num_ticks = 0
        self._first_tick_now = 0
        self.set_task_factory(_task_of_process)

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[object]:
        self.num_ticks += 1
        if self._is_to_sift:
            self._is_to_sift = False
            waiting = list(self._ready)
            self._ready.clear()
            for handle in waiting:
                self._ready.append(handle)
        elif timeout is None:
            raise Stalled("tasks wait, and no timer is left")
        else:
            self._now += timeout
        if timeout is not None and timeout > self._clock_resolution:
            self._first_tick_now = self.num_ticks
        elif self.num_ticks - self._first_tick_now > MAX_TICKS_AT_ONCE:
            self._first_tick_now = self.num_ticks
            raise Stalled("callbacks run without end, and no time passes")
        return []

    def sift(self) -> None:
        """From the next tick on, run nothing of a process that is frozen or dead."""
        if not isinstance(self._ready, _Ready):
            # A plain queue is faster and serves until the first such process.
            self._ready = _Ready(self._ready)
        self._is_to_sift = True

    def resume(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)

    def _process_events(self, event_list: list[object]) -> None:
        """Do nothing: there is no I/O."""

    def _write_to_self(self) -> None:
        """Do nothing: there are no other threads."""


class _Task(asyncio.Task[Any]):
    """A task that knows its process."""

    process: Process | None = None


def _task_of_process(
    loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
) -> asyncio.Task[Any]:
    task = _Task(work, loop=loop, context=context)
    task.process = PROCESS.get() if context is None else context.get(PROCESS)
    return task


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Return a function that runs this coroutine function on a loop of its own, and then ends what it has left."""

    @wraps(test)
    def run() -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(test())
        finally:
            bury(loop, ())

    return run


def bury(loop: VirtualLoop, processes: Iterable[Process]) -> None:
    """Cancel all tasks, those of dead processes too, and close the loop. So the garbage collector finds nothing to
    finish."""
    loop.set_exception_handler(lambda *_: None)
    tasks = [task for process in processes for task in process.bury()]
    tasks += asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(_end(tasks))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
