"""Prefill and decode rates that workers measure of themselves, and how long a router trusts them.

Only work renews a rate. A worker with a low rate gets few requests and measures little, so it would stay slow for ever.
Therefore a rate that is not renewed is trusted for a while and then rises towards the cluster's median. A rate above
the median does not fade: fast workers get requests and keep measuring. Pure: time is an argument.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from statistics import median

from blockyard.proto.v1 import cluster_pb2

LEAST_TOKENS_PER_SECOND = 1e-3
"""A lower rate counts as not measured."""


def is_measured(tokens_per_second: float) -> bool:
    """Return True for a valid rate. Workers may report any number."""
    return isfinite(tokens_per_second) and tokens_per_second >= LEAST_TOKENS_PER_SECOND


def typical(rates: Iterable[float]) -> float:
    """Return the median of the measured rates, or 0 if there are none."""
    measured = [rate for rate in rates if is_measured(rate)]
    return median(measured) if measured else 0.0


def faded(own: float, usual: float, *, age_seconds: float, half_life_seconds: float) -> float:
    """Return the trusted value of a worker's `own` rate of this age.

    It is `own` for one half-life. Each further half-life halves its distance to `usual`, the cluster's median, as a
    ratio. A half-life of 0 keeps `own` for ever, as does a rate that is not below `usual`.
    """
    fading_seconds = age_seconds - half_life_seconds
    if (
        own >= usual
        or fading_seconds <= 0
        or not half_life_seconds
        or not (is_measured(own) and is_measured(usual))
    ):
        return own
    return float(usual * (own / usual) ** (0.5 ** (fading_seconds / half_life_seconds)))


@dataclass(slots=True)
class Measured:
    """One rate of one worker, as last reported, and the time of its last measurement."""

    tokens_per_second: float = 0.0
    renewed_at: float = float("-inf")

    def report(self, tokens_per_second: float, now: float) -> None:
        """Take the rate of a load report. Only a changed value counts as a new measurement.

        A measurement is a smoothed quotient of times, so two of them are never equal.
        """
        if tokens_per_second != self.tokens_per_second:
            self.tokens_per_second, self.renewed_at = tokens_per_second, now

    def believed(self, usual: float, now: float, half_life_seconds: float) -> float:
        age_seconds = now - self.renewed_at
        return faded(
            self.tokens_per_second, usual, age_seconds=age_seconds, half_life_seconds=half_life_seconds
        )


class WorkerRates:
    """Rates of one incarnation of a worker."""

    def __init__(self) -> None:
        self.prefill = Measured()
        self.decode = Measured()

    def report(self, load: cluster_pb2.WorkerLoad, now: float) -> None:
        self.prefill.report(load.prefill_tokens_per_second, now)
        self.decode.report(load.decode_tokens_per_second, now)
