"""A busy worker gets no more requests than it has permits."""

from blockyard.router.cluster.gate import OFFERED_PERMITS, PROBE_SECONDS, REPORT_SECONDS, WorkerGate


def test_a_shut_gate_lets_one_through_for_each_place_and_opens_when_nobody_waits() -> None:
    gate = WorkerGate()
    gate.shut(0.0)
    assert not gate.admits(0.0)
    gate.freed_one()
    gate.freed_one()
    gate.took_one(0.0)
    assert gate.admits(0.0)
    gate.took_one(0.0)
    assert not gate.admits(0.0)
    assert gate.admits(PROBE_SECONDS), "a probe comes due by time"
    gate.took_one(PROBE_SECONDS)
    gate.queue_was_empty(PROBE_SECONDS / 2)
    assert not gate.admits(PROBE_SECONDS), "a report older than the BUSY opens nothing"
    gate.queue_was_empty(PROBE_SECONDS)
    assert not gate.admits(PROBE_SECONDS), "nor does one that may be older than what was sent last"
    gate.queue_was_empty(PROBE_SECONDS + REPORT_SECONDS)
    assert gate.admits(PROBE_SECONDS)


def test_a_long_line_goes_a_few_at_a_time_until_nobody_takes_what_is_offered() -> None:
    gate = WorkerGate()
    gate.shut(0.0)
    now = PROBE_SECONDS
    for _ in range(3):
        gate.queue_was_empty(now)
        for _ in range(OFFERED_PERMITS):
            assert gate.admits(now)
            gate.took_one(now)
        gate.queue_was_empty(now + REPORT_SECONDS / 2)
        assert not gate.admits(now), "the same report, told again, offers nothing more"
        now += REPORT_SECONDS
    gate.queue_was_empty(now)
    gate.queue_was_empty(now + PROBE_SECONDS)
    assert not gate.is_shut


def test_a_busy_takes_back_the_places_that_were_counted_before_it() -> None:
    gate = WorkerGate()
    gate.shut(0.0)
    gate.freed_one()
    gate.freed_one()
    gate.took_one(0.01)
    gate.shut(0.02)
    assert not gate.admits(0.02), "it was full when it said so"
    gate.freed_one()
    assert gate.admits(0.02)
