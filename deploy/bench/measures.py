"""Measurements of a request, and the arithmetic on them. Pure. The definitions are those of vLLM's `bench serve`:

- TTFT, time to first token: from sending to the first message that contains a token.
- E2EL, end-to-end latency: from sending to the last message that contains a token.
- TPOT, time per output token: (E2EL - TTFT) / (output tokens - 1), for requests with at least two output tokens.
- ITL, inter-token latency: between two messages that contain tokens. A router under load puts several tokens into one
  message, so the mean of ITL differs from that of TPOT.
- Goodput: finished requests per second that met every given objective. With one token, TPOT counts as 0.

Percentiles are interpolated linearly, as numpy does by default. Uses no numpy, which a client does not install.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles

PERCENTILES = {"p50": 500, "p90": 900, "p99": 990, "p99.9": 999}
"""Percentiles in thousandths, by name."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One request, as its client saw it. Times are in seconds on one monotonic clock."""

    number: int
    due: float
    """Time at which it should have been sent: the plan's in an open loop, `sent` in a closed one.

    A later turn of a chat is due in both when its pause after the answer before ends."""
    sent: float
    arrivals: list[float] = field(default_factory=list)
    """Times of the messages that contain tokens."""
    planned_prompt_tokens: int = 0
    planned_output_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens as the server counts them."""
    output_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""
    migrations: int = 0
    error: str = ""
    """Reason of the failure; "" if the request finished."""

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first. 0 with a single token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and percentiles of times, in ms. All are None if there are no times."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    p99_9: float | None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread":
        values = [value * 1000 for value in seconds]
        if not values:
            return cls(mean=None, p50=None, p90=None, p99=None, p99_9=None)
        # `quantiles` needs at least two values.
        cuts = quantiles(values * 2 if len(values) == 1 else values, n=1000, method="inclusive")
        p50, p90, p99, p99_9 = (cuts[thousandths - 1] for thousandths in PERCENTILES.values())
        return cls(mean=fmean(values), p50=p50, p90=p90, p99=p99, p99_9=p99_9)

    def as_dict(self) -> dict[str, float | None]:
        values = (self.p50, self.p90, self.p99, self.p99_9)
        return {"mean": self.mean, **dict(zip(PERCENTILES, values, strict=True))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Limits that a request must meet to count as goodput. None sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def are_given(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def kept_by(self, sample: Sample) -> bool:
        bounds = ((self.ttft_ms, sample.ttft), (self.tpot_ms, sample.tpot))
        return all(bound is None or seconds * 1000 <= bound for bound, seconds in bounds)


def finished(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples that have a complete answer."""
    return [sample for sample in samples if not sample.error and sample.arrivals]


def hit_rate(samples: Sequence[Sample]) -> float | None:
    """Return the share of prompt tokens that were read from cached blocks. None without prompt tokens."""
    prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    return sum(sample.cached_tokens for sample in samples) / prompt_tokens if prompt_tokens else None
