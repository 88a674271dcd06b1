"""Result of a benchmark, as tables for people and one document for programs. Pure: prints nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.deploy.bench.machine import machine, versions
from blockyard.deploy.bench.measures import PERCENTILES, Objectives, Spread
from blockyard.deploy.bench.summaries import Summary, Traffic, summary, together
from blockyard.deploy.views.quantities import counted
from blockyard.deploy.views.views import plain_table
from rich.console import Group, RenderableType
from rich.text import Text

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished benchmark."""

    setting: Mapping[str, Any]
    """Cluster, workload, seed, and concurrency or rate."""
    rounds: Mapping[str, Sequence[Summary]]
    """Summaries of the rounds, by policy."""
    whole: Mapping[str, Summary]
    """Summary of all rounds together, by policy."""

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.setting,
            "machine": machine(),
            "versions": versions(),
            "results": {
                policy: {
                    **whole.as_dict(),
                    "rounds": [part.as_dict() for part in self.rounds[policy]],
                }
                for policy, whole in self.whole.items()
            },
        }


def result(
    trials: Mapping[str, Sequence[Traffic]],
    objectives: Objectives,
    setting: Mapping[str, Any],
    *,
    own_policy: str,
) -> Result:
    """Summarise the runs, given by policy. `own_policy` names the router's policy, for runs that chose none."""
    named = {policy or own_policy: parts for policy, parts in trials.items()}
    return Result(
        setting={**setting, "slo_ttft_ms": objectives.ttft_ms, "slo_tpot_ms": objectives.tpot_ms},
        rounds={policy: [summary(part, objectives) for part in parts] for policy, parts in named.items()},
        whole={policy: summary(together(parts), objectives) for policy, parts in named.items()},
    )


def result_view(found: Result) -> RenderableType:
    parts: list[RenderableType] = [Text(_about(found.setting)), Text()]
    for policy, whole in found.whole.items():
        parts += [Text(f"policy {policy}", style="bold"), *_summary_view(whole), Text()]
    if len(found.whole) > 1:
        parts.append(_comparison(found))
    return Group(*(parts[:-1] if len(found.whole) == 1 else parts))


def _about(setting: Mapping[str, Any]) -> str:
    cluster, rate, concurrency = setting["cluster"], setting["rate"], setting["concurrency"]
    pace = (
        f"{concurrency} at once"
        if concurrency is not None
        else "at the trace's times"
        if rate is None
        else f"{rate:g}/s (Poisson)"
    )
    workers = "" if cluster["workers"] is None else f" on {counted(cluster['workers'], 'worker')}"
    return f"{setting['workload']}: {setting['about']}; {pace}, seed {setting['seed']}; {cluster['model']}{workers}"


def _summary_view(found: Summary) -> list[RenderableType]:
    headings = ("ms", "mean", *PERCENTILES)
    rows = [_spread_row(label, found.latencies_ms[name]) for name, label in LATENCIES.items()]
    workers = [
        (
            name,
            str(share.requests),
            str(share.output_tokens),
            _rate(share.hit_rate),
            _ms(share.ttft_ms.p50),
            _ms(share.ttft_ms.p99),
            _ms(share.tpot_ms.p50),
        )
        for name, share in found.workers.items()
    ]
    worker_headings = ("worker", "requests", "tokens out", "hit rate", "TTFT p50", "TTFT p99", "TPOT p50")
    return [
        Text(_counts(found)),
        plain_table(headings, rows),
        plain_table(worker_headings, workers),
        *_warnings(found),
    ]


def _counts(found: Summary) -> str:
    failed = ", ".join(f"{count} {reason}" for reason, count in found.failed.items()) or "none failed"
    unsent = f", {counted(found.unsent, 'turn')} not sent after these failures" if found.unsent else ""
    goodput = "" if found.goodput_per_second is None else f", goodput {found.goodput_per_second:.2f}/s"
    return (
        f"{counted(found.finished, 'request')} finished in {found.seconds:.1f} s, {failed}{unsent}; "
        f"{counted(found.migrations, 'migration')}\n"
        f"{found.requests_per_second:.2f} requests/s{goodput}, {found.input_tokens_per_second:.0f} tokens/s in, "
        f"{found.output_tokens_per_second:.0f} tokens/s out\n"
        f"hit rate {_rate(found.hit_rate)} (share of prompt tokens read from cached blocks), "
        f"promised by the index {_rate(found.predicted_hit_rate)}"
    )


def _warnings(found: Summary) -> list[RenderableType]:
    return [Text(text, style="yellow") for text in (*_other_counts(found), *_lateness(found))]


def _other_counts(found: Summary) -> Iterator[str]:
    """Yield a line if the server's token counts differ from the plan, for example if its tokenizer splits words."""
    planned = (found.planned_prompt_tokens, found.planned_output_tokens)
    by_server = (found.prompt_tokens, found.output_tokens)
    if planned != by_server:
        ratios = [
            f"{part / whole:.2f}" if whole else "-" for part, whole in zip(by_server, planned, strict=True)
        ]
        yield (
            f"the server counted {by_server[0]:,} tokens in and {by_server[1]:,} out; the plan has {planned[0]:,} and "
            f"{planned[1]:,} (ratios {ratios[0]} and {ratios[1]}). Rates and latencies use the server's counts"
        )


def _lateness(found: Summary) -> Iterator[str]:
    if not found.is_behind:
        return
    yield (
        f"the load generator was too slow: it sent requests {_ms(found.lag_ms.p50)} ms late (p50), "
        f"{_ms(found.lag_ms.p99)} ms (p99). The load was not as requested: use a faster machine or a lower rate"
    )


def _comparison(found: Result) -> RenderableType:
    (base, first), *others = found.whole.items()
    rows = []
    for name, value in _compared(first).items():
        cells = [name, _number(value)]
        for _, other in others:
            there = _compared(other)[name]
            ratio = f" ({there / value:.2f}x)" if value and there is not None else ""
            cells.append(f"{_number(there)}{ratio}")
        rows.append(tuple(cells))
    return plain_table(("", base, *(policy for policy, _ in others)), rows)


def _compared(found: Summary) -> dict[str, float | None]:
    ttft, tpot = found.latencies_ms["ttft"], found.latencies_ms["tpot"]
    return {
        "hit rate": found.hit_rate,
        "TTFT mean, ms": ttft.mean,
        "TTFT p50, ms": ttft.p50,
        "TTFT p99, ms": ttft.p99,
        "TPOT p50, ms": tpot.p50,
        "end to end p50, ms": found.latencies_ms["e2el"].p50,
        "requests/s": found.requests_per_second,
        "output tokens/s": found.output_tokens_per_second,
        "goodput/s": found.goodput_per_second,
    }


def _spread_row(name: str, spread: Spread) -> tuple[str, ...]:
    return (name, *(_ms(value) for value in spread.as_dict().values()))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
