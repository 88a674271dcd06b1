"""The thread that runs an engine: commands between steps, reports, stalls and its end."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from blockyard.worker.engine import Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.engine_types import EngineLoad, StepResult
from blockyard.worker.sequences.step_plan import StepPlan

from .engines import make_engine, request

PATIENCE_SECONDS = 10


@contextmanager
def running(
    engine: Engine,
    on_step: Callable[[StepResult, EngineLoad], None] = lambda result, load: None,
    on_death: Callable[[], None] = lambda: None,
) -> Iterator[EngineThread]:
    thread = EngineThread(engine, on_step, on_death)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop(PATIENCE_SECONDS)


def test_it_runs_commands_between_steps_and_commands_that_never_end_put_no_step_off() -> None:
    offsets: queue.SimpleQueue[int] = queue.SimpleQueue()
    done = threading.Event()

    def on_step(result: StepResult, load: EngineLoad) -> None:
        for output in result.outputs:
            offsets.put(output.token_offset)
            if output.is_last:
                done.set()

    with running(make_engine(), on_step) as thread:

        def again(engine: Engine) -> None:
            if not done.is_set():
                thread.call(again)

        thread.call(again)
        submitted = thread.call(lambda engine: engine.submit(request()))
        assert submitted.result(PATIENCE_SECONDS) == 0
        assert done.wait(PATIENCE_SECONDS)
        with pytest.raises(ValueError, match="a prompt of 0"):
            thread.call(lambda engine: engine.submit(request(0))).result(PATIENCE_SECONDS)
    assert [offsets.get() for _ in range(offsets.qsize())] == list(range(5))


def test_a_cancel_of_the_last_sequence_is_reported_though_no_step_follows() -> None:
    loads: queue.SimpleQueue[EngineLoad] = queue.SimpleQueue()

    def submit_and_cancel(engine: Engine) -> None:
        """Between two looks of the thread: what it reports is the cancel alone."""
        sequence_id = engine.submit(request(max_tokens=400))
        engine.step()
        engine.cancel(sequence_id)

    with running(make_engine(), lambda result, load: loads.put(load)) as thread:
        thread.call(submit_and_cancel)
        load = loads.get(timeout=PATIENCE_SECONDS)
    assert (load.running, load.used_blocks, load.generated_tokens) == (0, 0, 1)


def test_a_command_that_hangs_shows_as_a_step_does() -> None:
    released = threading.Event()
    deadline = time.monotonic() + PATIENCE_SECONDS

    def until(holds: Callable[[], bool]) -> None:
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with running(make_engine()) as thread:
        hangs = thread.call(lambda engine: released.wait(20))
        until(lambda: thread.stalled_seconds >= 0.05)
        released.set()
        assert hangs.result(PATIENCE_SECONDS)
        until(lambda: not thread.stalled_seconds)


def test_a_defect_ends_the_thread_and_is_reported() -> None:
    died = threading.Event()
    engine = make_engine()

    def broken_plan() -> StepPlan:
        raise AssertionError("an impossible state")

    engine.scheduler.plan = broken_plan  # type: ignore[method-assign]
    with running(engine, on_death=died.set) as thread:
        thread.call(lambda engine: engine.submit(request()))
        assert died.wait(PATIENCE_SECONDS)
