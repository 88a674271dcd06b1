"""Owners of asyncio tasks: no task is garbage-collected while it runs, fails unseen, or outlives its owner.

`in_own_thread` is for work that blocks and must not wait behind other such work.

`running` is for work beside one block. `BackgroundTasks` is for tasks whose lifetime spans several calls. Where all
tasks end inside one block and a failure must end the block at once, use `asyncio.TaskGroup`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from threading import Thread
from typing import Any, Self, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def log_failure(name: str, error: BaseException) -> None:
    """Log the exception that ended a task."""
    logger.error("task %r failed", name, exc_info=error)


class BackgroundTasks:
    """Tasks of one owner, on one event loop. `aclose` cancels what still runs and waits for its end.

    `on_failure` takes the name and the exception of each task that fails, in the event loop. Pass None where the caller
    awaits every task and handles its exception.
    """

    def __init__(self, on_failure: Callable[[str, BaseException], object] | None = log_failure) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Return the number of tasks that still run."""
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def start(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run `work` in a task until it ends or `aclose` cancels it. The caller may cancel the task earlier."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def aclose(self) -> None:
        """Cancel all tasks and wait for their end, those too that start meanwhile.

        A task that closes its own owner is not cancelled.
        """
        while others := self._tasks - {asyncio.current_task()}:
            await cancel_and_wait(*others)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._on_failure is None or task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._on_failure(task.get_name(), error)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, T], *, name: str | None = None) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` in a task beside the block. The end of the block cancels the task and waits for its end.

    The task's failure does not interrupt the block. It is raised at the block's end, or logged where the block raises
    an exception of its own.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        yield task
    except BaseException as error:
        await cancel_and_wait(task)
        if (failure := _failure(task)) is not None and failure is not error:
            log_failure(task.get_name(), failure)
        raise
    await cancel_and_wait(task)
    if (failure := _failure(task)) is not None:
        raise failure


async def cancel_and_wait(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel these tasks and wait until all have ended. Their results and exceptions are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def in_own_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Run `work` in a daemon thread of its own, and return the future of its result.

    It waits for no other work, as it would in the threads of `asyncio.to_thread`, and nothing waits for its end.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            outcome = partial(future.set_exception, error)
        else:
            outcome = partial(future.set_result, result)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    Thread(target=run, name=name, daemon=True).start()
    return future


def _failure(task: asyncio.Task[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()
