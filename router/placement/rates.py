"""What workers have measured of themselves, and how long it is believed.

A rate is measured by work. Who was slow once is given little, measures little, and would be slow for ever: so a rate
that nothing renews is believed whole for a while, and then rises to the cluster's. Who is faster than that stays so:
fast workers are chosen, and measure. Pure: time is an argument.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from statistics import median

from blockyard.proto.v1 import cluster_pb2

LEAST_TOKENS_PER_SECOND = 1e-3
"""A lower rate is no measurement."""


def is_measured(tokens_per_second: float) -> bool:
    """Workers may say anything; what is no rate counts as none."""
    return isfinite(tokens_per_second) and tokens_per_second >= LEAST_TOKENS_PER_SECOND


def typical(rates: Iterable[float]) -> float:
    """The median of those that were measured; 0 where none was."""
    measured = [rate for rate in rates if is_measured(rate)]
    return median(measured) if measured else 0.0


def faded(own: float, usual: float, *, age_seconds: float, half_life_seconds: float) -> float:
    """What is believed of a rate that was renewed so long ago: itself for a half-life, and after each further one half
    as far, in proportion, below the usual. A half-life of 0 keeps it for ever."""
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
    """One rate of one worker."""

    tokens_per_second: float = 0.0
    renewed_at: float = float("-inf")

    def report(self, tokens_per_second: float, now: float) -> None:
        """Every load report brings the rate, measured anew or not. It is a smoothed quotient of times: if it was, it
        differs."""
        if tokens_per_second != self.tokens_per_second:
            self.tokens_per_second, self.renewed_at = tokens_per_second, now

    def believed(self, usual: float, now: float, half_life_seconds: float) -> float:
        age_seconds = now - self.renewed_at
        return faded(
            self.tokens_per_second, usual, age_seconds=age_seconds, half_life_seconds=half_life_seconds
        )


class WorkerRates:
    """Of one life of a worker."""

    def __init__(self) -> None:
        self.prefill = Measured()
        self.decode = Measured()

    def report(self, load: cluster_pb2.WorkerLoad, now: float) -> None:
        self.prefill.report(load.prefill_tokens_per_second, now)
        self.decode.report(load.decode_tokens_per_second, now)
