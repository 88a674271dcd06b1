"""The arithmetic of latencies, goodput and hit rates, against plain counting."""

from itertools import pairwise
from statistics import mean

import pytest
from blockyard.deploy.bench.measures import Objectives, Sample, Spread, finished, hit_rate
from blockyard.deploy.bench.summaries import BEHIND_SECONDS, Traffic, summary, together
from hypothesis import given
from hypothesis import strategies as st

times = st.lists(st.floats(0.001, 5.0), min_size=1, max_size=12)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    sent = draw(st.floats(0, 100))
    now, arrivals = sent, []
    for gap in draw(times):
        now += gap
        arrivals.append(now)
    failed = draw(st.booleans())
    prompt_tokens = draw(st.integers(1, 500))
    return Sample(
        number=0,
        due=sent - draw(st.floats(0, 0.01)),
        sent=sent,
        arrivals=arrivals,
        prompt_tokens=prompt_tokens,
        cached_tokens=draw(st.integers(0, prompt_tokens)),
        output_tokens=len(arrivals) + draw(st.integers(0, 5)),
        worker=draw(st.sampled_from(["a", "b"])),
        migrations=draw(st.integers(0, 1)),
        error=draw(st.sampled_from(["OVERLOADED", "NO_WORKERS"])) if failed else "",
    )


def sample(*arrivals: float, tokens: int, **fields: float) -> Sample:
    return Sample(number=0, due=0.0, sent=0.0, arrivals=list(arrivals), output_tokens=tokens, **fields)  # type: ignore[arg-type]


def test_latencies_are_those_of_vllms_definitions() -> None:
    one = sample(0.5, 0.7, 1.1, tokens=5)
    assert one.ttft == 0.5
    assert one.e2el == pytest.approx(1.1)
    assert one.tpot == pytest.approx(0.6 / 4), "by tokens, not by messages"
    assert one.itls == pytest.approx([0.2, 0.4])


@given(st.lists(samples(), max_size=20))
def test_what_is_between_tokens_adds_up_to_what_is_between_first_and_last(found: list[Sample]) -> None:
    for one in found:
        assert sum(one.itls) == pytest.approx(one.e2el - one.ttft)
        assert one.tpot * max(one.output_tokens - 1, 0) == pytest.approx(
            one.e2el - one.ttft if one.output_tokens > 1 else 0.0
        )


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_percentiles_grow_lie_within_the_values_and_meet_them_where_they_are_hit(values: list[float]) -> None:
    spread = Spread.of(values)
    ordered = [spread.p50, spread.p90, spread.p99, spread.p99_9]
    for lower, higher in pairwise(ordered):
        assert lower is not None
        assert higher is not None
        assert lower <= higher * (1 + 1e-9) + 1e-9
    assert min(values) * 1000 <= ordered[0] + 1e-6  # type: ignore[operator]
    assert ordered[-1] <= max(values) * 1000 + 1e-6  # type: ignore[operator]
    assert spread.mean == pytest.approx(mean(values) * 1000)


def test_percentiles_are_interpolated_linearly() -> None:
    spread = Spread.of([0.010, 0.020])
    assert (spread.p50, spread.p90) == pytest.approx((15.0, 19.0))
    assert Spread.of([]).as_dict() == dict.fromkeys(("mean", "p50", "p90", "p99", "p99.9"))


@given(st.lists(samples(), max_size=30), st.floats(1, 5000), st.floats(1, 5000))
def test_a_summary_counts_every_request_once_and_no_failure_as_good(
    found: list[Sample], ttft_ms: float, tpot_ms: float
) -> None:
    told = summary(Traffic(samples=found, seconds=10.0), Objectives(ttft_ms=ttft_ms, tpot_ms=tpot_ms))
    done = [one for one in found if not one.error]
    assert told.finished == len(done) == len(finished(found))
    assert told.finished + sum(told.failed.values()) == len(found)
    assert sum(share.requests for share in told.workers.values()) == len(done)
    assert sum(share.output_tokens for share in told.workers.values()) == sum(
        one.output_tokens for one in done
    )
    good = [one for one in done if one.ttft * 1000 <= ttft_ms and one.tpot * 1000 <= tpot_ms]
    assert told.goodput_per_second == pytest.approx(len(good) / 10)
    assert told.goodput_per_second <= told.requests_per_second + 1e-9
    assert told.hit_rate == hit_rate(done)
    assert told.hit_rate is None or 0 <= told.hit_rate <= 1
    assert told.migrations == sum(one.migrations for one in found)


@given(st.lists(samples(), max_size=10), st.lists(samples(), max_size=10))
def test_rounds_together_are_all_their_requests_in_all_their_time(
    first: list[Sample], second: list[Sample]
) -> None:
    parts = [
        Traffic(samples=first, seconds=2.0, promised_tokens=3),
        Traffic(samples=second, seconds=3.0, promised_tokens=4),
    ]
    both = together(parts)
    assert list(both.samples) == first + second
    assert (both.seconds, both.promised_tokens) == (5.0, 7)
    assert together([*parts, Traffic(samples=[], seconds=1.0)]).promised_tokens is None


def test_without_objectives_there_is_no_goodput_and_one_token_keeps_any_tpot() -> None:
    one = sample(0.5, tokens=1, prompt_tokens=1)
    traffic = Traffic(samples=[one], seconds=1.0)
    assert summary(traffic, Objectives()).goodput_per_second is None
    assert summary(traffic, Objectives(tpot_ms=0.001)).goodput_per_second == 1.0
    assert summary(traffic, Objectives(ttft_ms=499)).goodput_per_second == 0.0


def test_a_generator_that_lags_is_told() -> None:
    def lagging(seconds: float) -> Traffic:
        one = Sample(number=0, due=1.0, sent=1.0 + seconds, arrivals=[9.0], output_tokens=1, prompt_tokens=1)
        return Traffic(samples=[one], seconds=1.0)

    assert not summary(lagging(BEHIND_SECONDS / 2), Objectives()).is_behind
    assert summary(lagging(BEHIND_SECONDS * 2), Objectives()).is_behind
