"""The adapter that requests name least often makes room, by averages that decay."""

from math import exp

import pytest
from blockyard.worker.cache.adapter_slots import RATE_SECONDS, AdapterRates, AdapterSlots
from blockyard.worker.sequences.adapter import Adapter
from hypothesis import given
from hypothesis import strategies as st

EVENTS = st.lists(st.tuples(st.floats(0, 100), st.sampled_from("abc")), max_size=30)


def adapter(name: str) -> Adapter:
    return Adapter(fingerprint=name, rank=8, num_bytes=1)


@given(EVENTS, st.floats(0, 1000))
def test_a_rate_is_the_decayed_count_of_requests_and_the_order_of_rates_needs_no_clock(
    events: list[tuple[float, str]], later: float
) -> None:
    rates, now, counts = AdapterRates(), 1e6, dict.fromkeys("abc", 0.0)
    for pause, name in events:
        now += pause
        counts = {known: count * exp(-pause / RATE_SECONDS) for known, count in counts.items()}
        counts[name] += 1
        rates.note(name, now)
    for name, count in counts.items():
        assert rates.per_second(name, now) == pytest.approx(count / RATE_SECONDS, rel=1e-6)
    at = now + later
    by_rate = {name: rates.per_second(name, at) for name in "abc"}
    by_score = sorted("abc", key=rates.score)
    assert [by_rate[name] for name in by_score] == sorted(by_rate.values())


def test_the_rarest_idle_adapter_makes_room_and_of_equal_ones_the_least_recently_used() -> None:
    slots = AdapterSlots(3)
    often, rare, used = adapter("often"), adapter("rare"), adapter("used")
    for one in (often, rare, used):
        slots.place([one], [])
    for now in range(5):
        slots.rates.note("often", float(now))
    slots.rates.note("rare", 5.0)
    slots.place([adapter("new")], in_use=[used])
    assert {one.fingerprint for one in slots.resident} == {"often", "used", "new"}
    slots.place([adapter("newer")], in_use=[])
    assert {one.fingerprint for one in slots.resident} == {"often", "new", "newer"}, "`used` is oldest"
