"""Summaries of a run's samples: latencies, throughput, goodput, hit rates, workers, errors. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.deploy.bench.measures import Objectives, Sample, Spread, finished, hit_rate

BEHIND_SECONDS = 0.05
"""The report warns if the generator's p99 delay in sending exceeds this: the load is then not as requested."""

_PLAIN = (
    *("seconds", "finished", "failed", "unsent", "migrations"),
    *("requests_per_second", "input_tokens_per_second", "output_tokens_per_second", "goodput_per_second"),
    *("prompt_tokens", "planned_prompt_tokens", "output_tokens", "planned_output_tokens"),
    *("hit_rate", "predicted_hit_rate"),
)
"""Fields of a Summary that `as_dict` contains unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Samples of one run, and its duration from the start of sending to the last answer."""

    samples: Sequence[Sample]
    seconds: float
    unsent: int = 0
    """Turns that were not sent because an earlier turn had failed."""
    promised_tokens: int | None = None
    """Prompt tokens that the index promised on the chosen workers, for everything the router placed during the run.
    None if unknown."""


def together(parts: Iterable[Traffic]) -> Traffic:
    """Join several runs into one whose duration is their sum."""
    parts = list(parts)
    promised = [part.promised_tokens for part in parts if part.promised_tokens is not None]
    return Traffic(
        samples=[sample for part in parts for sample in part.samples],
        seconds=sum(part.seconds for part in parts),
        unsent=sum(part.unsent for part in parts),
        promised_tokens=sum(promised) if parts and len(promised) == len(parts) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    requests: int
    output_tokens: int
    hit_rate: float | None
    ttft_ms: Spread
    tpot_ms: Spread

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "WorkerShare":
        return cls(
            requests=len(samples),
            output_tokens=sum(sample.output_tokens for sample in samples),
            hit_rate=hit_rate(samples),
            ttft_ms=Spread.of(sample.ttft for sample in samples),
            tpot_ms=_tpots(samples),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "output_tokens": self.output_tokens,
            "hit_rate": self.hit_rate,
            "ttft_ms": self.ttft_ms.as_dict(),
            "tpot_ms": self.tpot_ms.as_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    seconds: float
    finished: int
    failed: dict[str, int]
    """Number of failed requests by reason."""
    unsent: int
    prompt_tokens: int
    """Prompt tokens of finished requests, as the server counts them."""
    planned_prompt_tokens: int
    output_tokens: int
    planned_output_tokens: int
    latencies_ms: dict[str, Spread]
    """Latencies by the names ttft, tpot, itl and e2el."""
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    goodput_per_second: float | None
    """None without an objective."""
    hit_rate: float | None
    predicted_hit_rate: float | None
    migrations: int
    workers: dict[str, WorkerShare]
    lag_ms: Spread
    """Delay between the time at which a request was due and that at which it was sent."""

    @property
    def is_behind(self) -> bool:
        return (self.lag_ms.p99 or 0.0) > BEHIND_SECONDS * 1000

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            **{f"{name}_ms": spread.as_dict() for name, spread in self.latencies_ms.items()},
            "workers": {name: share.as_dict() for name, share in self.workers.items()},
            "generator_lag_ms": self.lag_ms.as_dict(),
            "generator_was_behind": self.is_behind,
        }


def summary(traffic: Traffic, objectives: Objectives) -> Summary:
    done = finished(traffic.samples)
    seconds = traffic.seconds
    prompt_tokens = sum(sample.prompt_tokens for sample in done)
    output_tokens = sum(sample.output_tokens for sample in done)
    good = sum(objectives.kept_by(sample) for sample in done)
    promised = traffic.promised_tokens
    return Summary(
        seconds=seconds,
        finished=len(done),
        failed=dict(Counter(sample.error for sample in traffic.samples if sample.error).most_common()),
        unsent=traffic.unsent,
        prompt_tokens=prompt_tokens,
        planned_prompt_tokens=sum(sample.planned_prompt_tokens for sample in done),
        output_tokens=output_tokens,
        planned_output_tokens=sum(sample.planned_output_tokens for sample in done),
        latencies_ms={
            "ttft": Spread.of(sample.ttft for sample in done),
            "tpot": _tpots(done),
            "itl": Spread.of(itl for sample in done for itl in sample.itls),
            "e2el": Spread.of(sample.e2el for sample in done),
        },
        requests_per_second=_per(len(done), seconds),
        input_tokens_per_second=_per(prompt_tokens, seconds),
        output_tokens_per_second=_per(output_tokens, seconds),
        goodput_per_second=_per(good, seconds) if objectives.are_given else None,
        hit_rate=hit_rate(done),
        predicted_hit_rate=promised / prompt_tokens if promised is not None and prompt_tokens else None,
        migrations=sum(sample.migrations for sample in traffic.samples),
        workers={
            worker: WorkerShare.of([sample for sample in done if sample.worker == worker])
            for worker in sorted({sample.worker for sample in done})
        },
        lag_ms=Spread.of(sample.sent - sample.due for sample in traffic.samples),
    )


def _tpots(samples: Iterable[Sample]) -> Spread:
    return Spread.of(sample.tpot for sample in samples if sample.output_tokens > 1)


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
