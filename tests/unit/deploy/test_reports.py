"""The supervisor's report is read back as it was stored, and a report older than the question proves nothing."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from blockyard.deploy.supervision.replicas import Replica, SupervisorReport
from blockyard.deploy.supervision.reports import (
    BEAT_SECONDS,
    SilentSupervisorError,
    decoded,
    encoded,
    keep_reported,
    next_report,
)
from hypothesis import given
from hypothesis import strategies as st

SILENT_SECONDS = 0.3
PATIENCE_SECONDS = 30.0

texts, counts = st.text(max_size=8), st.integers(0, 2**40)
replicas = st.builds(
    Replica,
    **dict.fromkeys(("name", "address", "http_address", "node_id", "incarnation", "code", "error"), texts),
    **dict.fromkeys(
        ("pid", "num_ready_workers", "num_starts", "num_failures_in_a_row", "num_missed"), counts
    ),
    kind=st.sampled_from(("worker", "router")),
    ranks=st.lists(st.tuples(texts, counts), max_size=3).map(tuple),
    phase=st.sampled_from(("starting", "downloading", "serving", "draining", "waiting", "stopped")),
    serving_since=st.none() | st.floats(0, 1e9),
    failed_at=st.none() | st.floats(0, 1e9),
    is_leaving=st.booleans(),
    is_retiring=st.booleans(),
)
reports = st.builds(
    SupervisorReport,
    pid=counts,
    code=texts,
    replicas=st.lists(replicas, max_size=4),
    cpus_per_worker=st.floats(0, 64),
    gpus_per_worker=st.floats(0, 8),
    at_seconds=st.floats(0, 1e9),
)


def report_of(pid: int) -> SupervisorReport:
    return SupervisorReport(
        pid=pid, code="", replicas=[], cpus_per_worker=1.0, gpus_per_worker=0.0, at_seconds=0.0
    )


@given(reports, counts)
def test_a_report_comes_back_as_it_was_stored(report: SupervisorReport, beat: int) -> None:
    assert decoded(encoded(report, beat)) == report


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[]", b"null", b'{"beat": 1}', b'{"places": []}', b"[" * 100_000]
)
def test_what_is_no_report_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="not one of this version"):
        decoded(text)


@contextmanager
def supervisor(stored: list[bytes], pid: int) -> Iterator[None]:
    """Stores its report in a thread of its own until the end of the block."""

    async def store(text: bytes) -> None:
        stored.append(text)

    async def life() -> None:
        reporting = asyncio.create_task(keep_reported(lambda: report_of(pid), store))
        await asyncio.to_thread(over.wait)
        reporting.cancel()

    over = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(life()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_supervisor_that_lives_is_heard_although_nothing_changes() -> None:
    stored: list[bytes] = []
    with supervisor(stored, pid=7):
        for _ in range(3):
            assert next_report(lambda: stored[-1] if stored else None, PATIENCE_SECONDS) == report_of(7)


def test_what_a_supervisor_stored_before_it_hung_is_not_shown() -> None:
    with pytest.raises(SilentSupervisorError, match="did not answer within"):
        next_report(lambda: encoded(report_of(7), 3), SILENT_SECONDS)
    with pytest.raises(SilentSupervisorError):
        next_report(lambda: None, SILENT_SECONDS)


def test_the_report_of_the_next_supervisor_is_taken() -> None:
    stored = [encoded(report_of(7), 0)]
    with supervisor(stored, pid=8):
        assert next_report(lambda: stored[-1], PATIENCE_SECONDS).pid == 8
    assert BEAT_SECONDS < 1.0, "each look waits for so long at most"
