"""Rate limits: no tenant exceeds its limit and a burst in a minute, refusals are free, and unused tokens come back."""

import pytest
from blockyard.router.admission import rate_limits
from blockyard.router.admission.rate_limits import MINUTE_SECONDS, Limited, RateLimit, RateLimits
from blockyard.router.errors import RateLimited
from hypothesis import given, settings
from hypothesis import strategies as st

from .prompt import Clock


def limited(key: str = "ann", *, requests: int | None = None, tokens: int | None = None) -> Limited:
    limit = RateLimit(requests_per_minute=requests, tokens_per_minute=tokens)
    return Limited(key=key, label="this token", limit=limit)


def ask(limits: RateLimits, *who: Limited, tokens: int = 0, used: int = 0) -> RateLimited | None:
    """One call from its beginning to its end at once; its refusal, if it is one."""
    try:
        with limits.charge(who, tokens=tokens) as charge:
            charge.use(used)
    except RateLimited as refusal:
        return refusal
    return None


@settings(deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 500),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 700)), min_size=1, max_size=60),
)
def test_in_no_window_is_more_let_in_than_the_rate_and_a_burst(requests, tokens, calls):
    clock = Clock()
    limits, ann = RateLimits(clock), limited(requests=requests, tokens=tokens)
    admitted: list[tuple[float, int]] = []
    for pause, wanted in calls:
        clock.now += pause
        if ask(limits, ann, tokens=wanted, used=min(wanted, tokens)) is None:
            admitted.append((clock.now, min(wanted, tokens)))
    for first, (begin, _) in enumerate(admitted):
        for last in range(first, len(admitted)):
            window = admitted[first : last + 1]
            minutes = (admitted[last][0] - begin) / MINUTE_SECONDS
            assert len(window) <= requests * (1 + minutes) + 1e-6
            assert sum(amount for _, amount in window) <= tokens * (1 + minutes) + 1e-6


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 500), st.lists(st.integers(0, 700), min_size=1, max_size=40))
def test_whoever_comes_back_when_it_is_told_to_is_let_in(requests: int, tokens: int, calls: list[int]):
    clock = Clock()
    limits, ann = RateLimits(clock), limited(requests=requests, tokens=tokens)
    for wanted in calls:
        refusal = ask(limits, ann, tokens=wanted, used=wanted)
        if refusal is not None:
            assert refusal.retry_after_seconds is not None
            assert refusal.retry_after_seconds > 0
            clock.now += refusal.retry_after_seconds + 1e-6
            assert ask(limits, ann, tokens=wanted, used=wanted) is None


def test_a_refused_call_takes_nothing_of_any_bucket() -> None:
    limits = RateLimits(Clock())
    token, tenant = limited("t", requests=10, tokens=1000), limited("acme", tokens=50)
    answers = [ask(limits, token, tenant, tokens=40, used=40) for _ in range(100)]
    assert [answer is None for answer in answers] == [True] + 99 * [False]
    standing = limits.standing((token,), "requests")
    assert standing is not None
    assert standing.remaining == 9
    tokens = limits.standing((token,), "tokens")
    assert tokens is not None
    assert tokens.remaining == 960


def test_what_was_asked_for_and_not_used_comes_back_at_the_end_and_a_void_call_costs_nothing() -> None:
    limits, ann = RateLimits(Clock()), limited(requests=2, tokens=100)
    with limits.charge((ann,), tokens=90) as charge:
        assert ask(limits, ann, tokens=20) is not None
        charge.use(30)
    assert ask(limits, ann, tokens=70, used=70) is None
    assert ask(limits, ann) is not None, "two requests were made"
    limits = RateLimits(Clock())
    with limits.charge((ann,), tokens=90) as charge:
        charge.void()
    standing = [limits.standing((ann,), kind) for kind in rate_limits.KINDS]
    assert [one and (one.remaining, one.full_in_seconds) for one in standing] == [(2, 0.0), (100, 0.0)]


def test_a_call_larger_than_a_minute_takes_a_full_bucket_and_owes_the_rest() -> None:
    clock = Clock()
    limits, ann = RateLimits(clock), limited(tokens=100)
    assert ask(limits, ann, tokens=10_000, used=300) is None
    clock.now += 2 * MINUTE_SECONDS
    refusal = ask(limits, ann, tokens=1)
    assert refusal is not None
    clock.now += MINUTE_SECONDS
    assert ask(limits, ann, tokens=100) is None


@settings(deadline=None)
@given(st.integers(0, 900), st.integers(0, 900), st.lists(st.floats(0, 90), max_size=5))
def test_what_a_call_owes_does_not_depend_on_who_looks_while_it_runs(wanted, used, pauses):
    remaining = []
    for is_looked_at in (False, True):
        clock = Clock()
        limits, ann = RateLimits(clock), limited(tokens=100)
        with limits.charge((ann,), tokens=wanted) as charge:
            for pause in pauses:
                clock.now += pause
                if is_looked_at:
                    limits.standing((ann,), "tokens")
            charge.use(used)
        standing = limits.standing((ann,), "tokens")
        assert standing is not None
        remaining.append(standing.full_in_seconds)
    assert remaining[0] == pytest.approx(remaining[1], abs=1e-6)


def test_a_limit_that_changes_counts_from_then_on() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    assert ask(limits, limited(tokens=1000), tokens=10, used=10) is None
    assert ask(limits, limited(tokens=5), tokens=5, used=5) is None
    assert ask(limits, limited(tokens=5), tokens=1) is not None
    assert ask(limits, limited(), tokens=10**9, used=10**9) is None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "MAX_BUCKETS", 8)
    clock = Clock()
    limits = RateLimits(clock)
    for number in range(30):
        assert ask(limits, limited(f"name-{number}", requests=1)) is None
        assert len(limits) <= 8
