"""Series for each alert: some under which it must fire at a moment, and similar ones under which it must not.

They use promtool's notation: `a+bxn` is a, then n times b more, with one sample every 15 seconds.
"""

from dataclasses import dataclass

STEP_SECONDS = 15
STEPS = 600
"""150 minutes: the longest range that an alert looks back."""

Series = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCase:
    alert: str
    firing: Series
    quiet: Series
    minutes: float = 20.0
    """When it is looked at."""


def always(value: float) -> str:
    return f"{value}x{STEPS}"


def growing(by: float) -> str:
    return f"0+{by}x{STEPS}"


def _series(metric: str, label: str, **by_value: str) -> Series:
    """Return the series of a metric, one for each value of a label."""
    name = f"blockyard_{metric}"
    router = "" if label in ("router", "worker") else 'router="r",'
    return {f'{name}{{{router}{label}="{value}"}}': values for value, values in by_value.items()}


def _totals(metric: str, label: str, **by_value: float) -> Series:
    return _series(f"{metric}_total", label, **{value: growing(by) for value, by in by_value.items()})


def _workers_of(**by_model: str) -> Series:
    named = _series("workers", "model_name", **by_model)
    return {name.replace('router="r"', 'router="r",state="ready"'): values for name, values in named.items()}


def _slow(metric: str, bound: str, above: str, late: float, of: float) -> Series:
    """Return a histogram of which `late` of `of` events in each step are above a bound."""
    name = f"blockyard_{metric}_bucket"
    counts = {bound: growing(of - late), above: growing(of), "+Inf": growing(of)}
    return {f'{name}{{router="r",le="{le}"}}': values for le, values in counts.items()}


def _pool(preemptions: float) -> Series:
    return _series("kv_usage_ratio", "worker", w=always(0.98)) | _totals(
        "preemptions", "worker", w=preemptions
    )


def _promises(stale: float) -> Series:
    return _totals("promised_blocks", "router", r=100) | _totals("stale_blocks", "router", r=stale)


def _hits(late_gain: float) -> Series:
    """Return series in which half of all prompt tokens are reused for 100 minutes, and then `late_gain` percent."""
    cached = f"0+50x400 {20000 + late_gain}+{late_gain}x200"
    prompts = _totals("router_prompt_tokens", "router", r=100)
    return prompts | _series("router_cached_tokens_total", "router", r=cached)


def _case(alert: str, firing: Series, quiet: Series, minutes: float = 20.0) -> AlertCase:
    return AlertCase(alert=f"Blockyard{alert}", firing=firing, quiet=quiet, minutes=minutes)


DRAINING = _series("router_draining", "router", r=always(1))
CASES = (
    _case("NoRouters", DRAINING, DRAINING | _series("router_draining", "router", s=always(0))),
    _case(
        "NoWorkers",
        _workers_of(first=always(2), gone="1x70 0x100"),
        _workers_of(first=always(2), added="_x70 0x100"),
    ),
    _case(
        "WorkerDead",
        _workers_of(large=always(9), small="4x60 3x60"),
        _workers_of(large=always(9), small="4x79 3x1 4x60"),
    ),
    _case("WorkerSuspect", *(_series("workers", "state", **{s: always(1)}) for s in ("suspect", "draining"))),
    _case(
        "WorkerRefused", *(_series("workers", "state", **{s: always(1)}) for s in ("refused", "connecting"))
    ),
    _case("WorkerStalled", *(_series("stalled_seconds", "worker", w=w) for w in (growing(15), always(3)))),
    _case("PoolFull", _pool(1), _pool(0)),
    _case("QueueGrowing", *(_series("router_waiting", "router", r=r) for r in (growing(1), always(30)))),
    _case(
        "Overloaded",
        _totals("requests", "outcome", OK=90, OVERLOADED=10),
        _totals("requests", "outcome", OK=99, OVERLOADED=1),
    ),
    _case(
        "Errors",
        _totals("requests", "outcome", OK=90, WORKER_LOST=10),
        _totals("requests", "outcome", OK=50, INVALID_REQUEST=25, CANCELLED=25),
    ),
    _case(
        "SlowFirstToken",
        *(_slow("time_to_first_token_seconds", "10.0", "30.0", late, 100) for late in (10, 1)),
    ),
    _case("IndexDegraded", *(_series("router_index_state", "router", r=always(r)) for r in (3, 1))),
    _case("IndexLagging", *(_series("index_lag_seconds", "worker", w=w) for w in (growing(15), always(0.5)))),
    _case("IndexStale", _promises(40), _promises(5), minutes=30.0),
    _case("HitRateCollapsed", _hits(5), _hits(45), minutes=130.0),
    _case("RouterLag", *(_slow("loop_lag_seconds", "0.05", "0.1", late, 1000) for late in (100, 1))),
    _case("Migrations", *(_totals("migrations", "router", r=by) for by in (1, 0.01))),
    _case(
        "AuthFileInvalid",
        *(_series("auth_file_valid", "router", r=always(1), s=s) for s in ("1x60 0x100", "1x70 0x1 1x100")),
    ),
    _case(
        "TlsFilesInvalid",
        *(_series("tls_files_valid", "router", r=always(1), s=s) for s in ("1x60 0x100", always(1))),
    ),
    _case(
        "CallsRefused",
        _totals("refused_calls", "reason", UNAUTHENTICATED=20, AUTH_UNAVAILABLE=10)
        | _totals("requests", "outcome", OK=20),
        _totals("refused_calls", "reason", UNAUTHENTICATED=20) | _totals("requests", "outcome", OK=90),
    ),
)
