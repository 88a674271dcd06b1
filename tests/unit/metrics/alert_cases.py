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


def _requests(**by_outcome: float) -> Series:
    return {
        f'blockyard_requests_total{{router="r",outcome="{outcome}"}}': growing(by)
        for outcome, by in by_outcome.items()
    }


def _workers(state: str, values: str) -> Series:
    return {f'blockyard_workers{{router="r",state="{state}"}}': values}


def _workers_of(**by_model: str) -> Series:
    return {
        f'blockyard_workers{{router="r",state="ready",model_name="{model}"}}': values
        for model, values in by_model.items()
    }


def _gauges(name: str, **by_router: str) -> Series:
    return {f'blockyard_{name}{{router="{router}"}}': values for router, values in by_router.items()}


def _refused(**by_reason: float) -> Series:
    return {
        f'blockyard_refused_calls_total{{router="r",reason="{reason}"}}': growing(by)
        for reason, by in by_reason.items()
    }


def _first_tokens(*, slow: float) -> Series:
    name = "blockyard_time_to_first_token_seconds_bucket"
    return {
        f'{name}{{router="r",le="10.0"}}': growing(100 - slow),
        f'{name}{{router="r",le="30.0"}}': growing(100),
        f'{name}{{router="r",le="+Inf"}}': growing(100),
    }


def _lag(*, late: float) -> Series:
    name = "blockyard_loop_lag_seconds_bucket"
    return {
        f'{name}{{router="r",le="0.05"}}': growing(1000 - late),
        f'{name}{{router="r",le="0.1"}}': growing(1000),
        f'{name}{{router="r",le="+Inf"}}': growing(1000),
    }


def _pool(usage: float, preemptions: float) -> Series:
    return {
        'blockyard_kv_usage_ratio{worker="w"}': always(usage),
        'blockyard_preemptions_total{worker="w"}': growing(preemptions),
    }


def _promises(stale: float) -> Series:
    return {
        'blockyard_promised_blocks_total{router="r"}': growing(100),
        'blockyard_stale_blocks_total{router="r"}': growing(stale),
    }


def _hits(late_gain: float) -> Series:
    """Return series in which half of all prompt tokens are reused for 100 minutes, and then `late_gain` percent."""
    return {
        'blockyard_router_prompt_tokens_total{router="r"}': growing(100),
        'blockyard_router_cached_tokens_total{router="r"}': f"0+50x400 {20000 + late_gain}+{late_gain}x200",
    }


CASES = (
    AlertCase(
        alert="BlockyardNoRouters",
        firing={'blockyard_router_draining{router="r"}': always(1)},
        quiet={
            'blockyard_router_draining{router="r"}': always(1),
            'blockyard_router_draining{router="s"}': always(0),
        },
    ),
    AlertCase(
        alert="BlockyardNoWorkers",
        firing=_workers_of(first=always(2), gone="1x70 0x100"),
        quiet=_workers_of(first=always(2), added="_x70 0x100"),
    ),
    AlertCase(
        alert="BlockyardWorkerDead",
        firing=_workers_of(large=always(9), small="4x60 3x60"),
        quiet=_workers_of(large=always(9), small="4x79 3x1 4x60"),
    ),
    AlertCase(
        alert="BlockyardWorkerSuspect",
        firing=_workers("suspect", always(1)),
        quiet=_workers("draining", always(1)),
    ),
    AlertCase(
        alert="BlockyardWorkerRefused",
        firing=_workers("refused", always(1)),
        quiet=_workers("connecting", always(1)),
    ),
    AlertCase(
        alert="BlockyardWorkerStalled",
        firing={'blockyard_stalled_seconds{worker="w"}': growing(15)},
        quiet={'blockyard_stalled_seconds{worker="w"}': always(3)},
    ),
    AlertCase(alert="BlockyardPoolFull", firing=_pool(0.98, 1), quiet=_pool(0.98, 0)),
    AlertCase(
        alert="BlockyardQueueGrowing",
        firing={'blockyard_router_waiting{router="r"}': growing(1)},
        quiet={'blockyard_router_waiting{router="r"}': always(30)},
    ),
    AlertCase(
        alert="BlockyardOverloaded",
        firing=_requests(OK=90, OVERLOADED=10),
        quiet=_requests(OK=99, OVERLOADED=1),
    ),
    AlertCase(
        alert="BlockyardErrors",
        firing=_requests(OK=90, WORKER_LOST=10),
        quiet=_requests(OK=50, INVALID_REQUEST=25, CANCELLED=25),
    ),
    AlertCase(alert="BlockyardSlowFirstToken", firing=_first_tokens(slow=10), quiet=_first_tokens(slow=1)),
    AlertCase(
        alert="BlockyardIndexDegraded",
        firing={'blockyard_router_index_state{router="r"}': always(3)},
        quiet={'blockyard_router_index_state{router="r"}': always(1)},
    ),
    AlertCase(
        alert="BlockyardIndexLagging",
        firing={'blockyard_index_lag_seconds{worker="w"}': growing(15)},
        quiet={'blockyard_index_lag_seconds{worker="w"}': always(0.5)},
    ),
    AlertCase(alert="BlockyardIndexStale", firing=_promises(40), quiet=_promises(5), minutes=30.0),
    AlertCase(alert="BlockyardHitRateCollapsed", firing=_hits(5), quiet=_hits(45), minutes=130.0),
    AlertCase(alert="BlockyardRouterLag", firing=_lag(late=100), quiet=_lag(late=1)),
    AlertCase(
        alert="BlockyardMigrations",
        firing={'blockyard_migrations_total{router="r"}': growing(1)},
        quiet={'blockyard_migrations_total{router="r"}': growing(0.01)},
    ),
    AlertCase(
        alert="BlockyardAuthFileInvalid",
        firing=_gauges("auth_file_valid", r=always(1), s="1x60 0x100"),
        quiet=_gauges("auth_file_valid", r=always(1), s="1x70 0x1 1x100"),
    ),
    AlertCase(
        alert="BlockyardTlsFilesInvalid",
        firing=_gauges("tls_files_valid", r=always(1), s="1x60 0x100"),
        quiet=_gauges("tls_files_valid", r=always(1), s=always(1)),
    ),
    AlertCase(
        alert="BlockyardCallsRefused",
        firing=_refused(UNAUTHENTICATED=20, AUTH_UNAVAILABLE=10) | _requests(OK=20),
        quiet=_refused(UNAUTHENTICATED=20) | _requests(OK=90),
    ),
)
