"""A blocked event loop is detected, reported once, and told apart from a machine without a free processor."""

import asyncio
import logging
import time

import pytest
from blockyard.router.loop_watch import ALARM_PAUSE_SECONDS, IDLE_TICKS, START_SECONDS, Lateness, LoopWatch

HELD_SECONDS = 0.1


async def test_a_callback_that_computes_is_seen_in_full_and_told_apart_from_one_that_blocks() -> None:
    for watch, clock in (
        (LoopWatch(0.001), time.thread_time),
        (LoopWatch(0.001, thread_clock=lambda: 0.0), time.monotonic),
    ):
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(watch.run())
            await asyncio.sleep(0.02)
            end = clock() + HELD_SECONDS
            while clock() < end:
                pass
            await asyncio.sleep(0.02)
            running.cancel()
        seen = watch.seen
        assert seen.num_ticks > 1
        assert seen.num_late >= 1
        assert seen.worst_seconds >= HELD_SECONDS
        computed = seen.worst_computing_seconds
        assert computed >= HELD_SECONDS if clock is time.thread_time else computed == 0


async def test_a_pause_is_never_told_shorter_than_it_was_whenever_it_begins() -> None:
    """Also one that begins with the watch's own sleep."""
    held_seconds, told = 0.008, []
    for begins_after_seconds in (0.0, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005):
        watch = LoopWatch(0.001)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(watch.run())
            await asyncio.sleep(begins_after_seconds)
            end = time.monotonic() + held_seconds
            while time.monotonic() < end:
                pass
            await asyncio.sleep(0.002)
            running.cancel()
        told.append(watch.seen)
    assert all(seen.worst_seconds >= held_seconds for seen in told)
    assert all(seen.num_late >= 1 for seen in told)


class IdleLoop:
    """Clocks of a loop on which only the watch wakes, until the watch has slept for a number of ticks."""

    def __init__(self, sleeps: list[float], computing_share: float, computing_a_second: float = 0.0) -> None:
        self.now = self.computing = 0.0
        self.sleeps = sleeps
        self._share = computing_share
        self._a_second = computing_a_second
        """Seconds of work at once, each second."""

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        if len(self.sleeps) > 2000:
            raise asyncio.CancelledError
        is_next_second = int(self.now + seconds) > int(self.now)
        self.now += seconds
        self.computing += self._share * seconds + is_next_second * self._a_second


@pytest.mark.parametrize(("computing_share", "longest"), [(0.01, IDLE_TICKS * 0.005), (0.2, 0.005)])
async def test_an_idle_loop_is_watched_less_often_and_its_long_sleeps_are_no_pauses(
    computing_share: float, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = IdleLoop([], computing_share)
    watch = LoopWatch(0.005, clock=lambda: loop.now, thread_clock=lambda: loop.computing)
    monkeypatch.setattr(asyncio, "sleep", loop.sleep)
    with pytest.raises(asyncio.CancelledError):
        await watch.run()
    assert loop.sleeps[-1] == longest
    assert watch.seen.num_late == 0
    assert watch.seen.worst_seconds == pytest.approx(0.005)


async def test_work_once_a_second_ends_no_idle_time_for_longer_than_itself(monkeypatch: pytest.MonkeyPatch):
    loop = IdleLoop([], 0.01, computing_a_second=0.004)
    watch = LoopWatch(0.005, clock=lambda: loop.now, thread_clock=lambda: loop.computing)
    monkeypatch.setattr(asyncio, "sleep", loop.sleep)
    with pytest.raises(asyncio.CancelledError):
        await watch.run()
    last_seconds = loop.sleeps[len(loop.sleeps) // 2 :]
    assert last_seconds.count(0.005) <= 2 * sum(last_seconds)


def test_figures_add_up_until_they_are_taken() -> None:
    watch = LoopWatch(0.001)
    for pause_seconds, computing_seconds in ((0.001, 0.001), (0.02, 0.5), (0.03, 0.004)):
        watch.note(pause_seconds, computing_seconds)
    expected = Lateness(num_ticks=3, num_late=2, worst_seconds=0.03, worst_computing_seconds=0.02)
    assert watch.seen == expected
    assert watch.take() == expected
    assert watch.seen == Lateness()
    assert str(expected) == "2 of 3 ticks late by over 5 ms, longest pause 30.0 ms, computing 20.0 ms of it"


def test_one_warning_in_a_while_is_enough_and_none_comes_of_a_short_pause_while_all_starts(caplog):
    now = 100.0
    watch = LoopWatch(0.001, clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        watch.note(0.5, 0.1)
        assert not caplog.records
        watch.note(1.5, 0.1)
        assert len(caplog.records) == 1
        assert (watch.seen.num_late, watch.seen.worst_seconds) == (2, 1.5)
        caplog.clear()
        watch = LoopWatch(0.001, clock=lambda: now)
        now += START_SECONDS
        for pause_seconds in (0.04, 0.2, 0.3):
            watch.note(pause_seconds, 0.0)
        told = "the event loop stood still for 200 ms and computed for 0 ms of it"
        assert [record.getMessage() for record in caplog.records] == [told]
        now += ALARM_PAUSE_SECONDS
        watch.note(0.4, 0.0)
    assert len(caplog.records) == 2
