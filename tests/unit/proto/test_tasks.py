"""Every task has an owner: it is kept alive, its failure is reported, and it ends with its owner."""

import asyncio
import gc
import logging
import weakref

import pytest
from blockyard.proto.runtime.tasks import BackgroundTasks, cancel_and_wait, running


async def fail() -> None:
    raise LookupError("the disk is gone")


async def test_a_running_task_is_not_garbage_collected() -> None:
    async def wait_for_a_future_of_its_own() -> None:
        await asyncio.get_running_loop().create_future()

    async with BackgroundTasks() as tasks:
        task = weakref.ref(tasks.start(wait_for_a_future_of_its_own(), name="waits"))
        await asyncio.sleep(0)
        gc.collect()
        assert task() is not None
        assert len(tasks) == 1


async def test_closing_cancels_and_waits_for_the_end() -> None:
    ends = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("cleaned up")

    async with BackgroundTasks() as tasks:
        tasks.start(work(), name="work")
        await asyncio.sleep(0)
    assert ends == ["cleaned up"]
    assert not len(tasks)


async def test_a_failure_is_logged_with_the_name_of_the_task_or_goes_to_its_owner(caplog):
    seen: list[tuple[str, str]] = []
    async with BackgroundTasks(lambda name, error: seen.append((name, str(error)))) as tasks:
        await asyncio.wait({tasks.start(fail(), name="disk watch")})
    assert seen == [("disk watch", "the disk is gone")]
    async with BackgroundTasks(on_failure=None) as tasks:
        with pytest.raises(LookupError):
            await tasks.start(fail(), name="start")
    async with BackgroundTasks() as tasks:
        cancelled = tasks.start(asyncio.sleep(60), name="sleep")
        await cancel_and_wait(cancelled)
        assert cancelled.cancelled()
        assert not caplog.records, "none of these is logged"
        await asyncio.wait({tasks.start(fail(), name="disk watch")})
        assert not len(tasks)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "task 'disk watch' failed")
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LookupError)


async def test_a_task_may_close_its_owner() -> None:
    tasks = BackgroundTasks()

    async def close() -> str:
        await tasks.aclose()
        return "closed"

    other = tasks.start(asyncio.sleep(60), name="other")
    async with asyncio.timeout(60):
        assert await tasks.start(close(), name="closer") == "closed"
    assert other.cancelled()


async def test_work_beside_a_block_ends_with_the_block_which_may_take_its_result() -> None:
    async with running(asyncio.sleep(60, "late")) as task:
        await asyncio.sleep(0)
        assert not task.done()
    assert task.cancelled()
    async with running(asyncio.sleep(0, "done")) as task:
        assert await task == "done"


async def test_a_failure_beside_a_block_is_raised_at_its_end_once_or_logged_where_the_block_fails_too(caplog):
    reached = []

    async def block(*, raises: bool) -> None:
        async with running(fail(), name="disk watch") as task:
            await asyncio.wait({task})
            reached.append("the end of the block")
            if raises:
                raise KeyError

    with pytest.raises(LookupError):
        await block(raises=False)
    assert reached
    with pytest.raises(LookupError):
        async with running(fail()) as task:
            await task
    assert not caplog.records
    with pytest.raises(KeyError):
        await block(raises=True)
    assert [record.getMessage() for record in caplog.records] == ["task 'disk watch' failed"]


async def test_cancelling_the_block_ends_the_work() -> None:
    tasks = []

    async def block() -> None:
        async with running(asyncio.sleep(60)) as task:
            tasks.append(task)
            await asyncio.Event().wait()

    outer = asyncio.create_task(block())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await cancel_and_wait(outer)
    assert outer.cancelled()
    assert tasks[0].cancelled()


async def test_a_task_that_starts_while_its_owner_closes_is_cancelled_too() -> None:
    tasks = BackgroundTasks()
    begun = asyncio.Event()

    async def starts_another() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            tasks.start(asyncio.Event().wait(), name="late")

    tasks.start(starts_another(), name="first")
    await begun.wait()
    await tasks.aclose()
    assert len(tasks) == 0
