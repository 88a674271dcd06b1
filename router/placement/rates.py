"""Speeds of workers, compared at equal work, and how long a router trusts them.

All workers serve one model, so one set of costs (proto/step_costs.py) is fitted to the steps of all of them. Each
worker has a slowness: the time of its steps over the expected time of the same work. A worker with small steps or long
contexts is then not taken to be slow. Most clusters have equal machines, so a small difference is taken to be chance,
and a large one to be real.

Only work renews a slowness. A slow worker gets few requests and measures little, so it would stay slow for ever.
Therefore a slowness that is not renewed is trusted for a while and then falls towards the cluster's median. Pure: time
is an argument.
"""

from collections.abc import Iterable, Sequence
from math import exp, log
from statistics import median

from blockyard.proto.step_costs import StepCosts, StepWork, WorkRows
from blockyard.proto.v1 import cluster_pb2

LEAST_TOKENS_PER_SECOND = 1e-3
"""A lower rate counts as not measured."""
MOST_TOKENS_PER_SECOND = 1e15
"""A higher rate counts as not measured. It keeps every cost far below the largest float."""
WINDOW_ROWS = 12
"""Rows of work, of about 0.1 s each, over which a worker's slowness is averaged."""
DOUBT = 0.12
"""Logarithm of a slowness that is as likely to come from the fit as from the machine."""
ROW_DOUBT = 0.5
"""Standard deviation of the logarithm of one row's slowness. More rows leave less doubt."""
LARGEST_CHANGE = log(4)
"""Largest difference of one row from the average that counts."""
FIT_SECONDS = 0.01
"""Rows enter the common fit at most this often, which bounds the time that it takes a router."""
REFRESH_SECONDS = 0.1
"""Interval at which the workers' speeds are compared."""


def is_measured(value: float) -> bool:
    """Return True for a valid rate in tokens a second, or a valid time in milliseconds. Workers may report any
    number."""
    return LEAST_TOKENS_PER_SECOND <= value <= MOST_TOKENS_PER_SECOND


def shrunk(difference: float, num_rows: int) -> float:
    """Return the trusted part of a worker's `difference` from the median, both logarithms of a slowness.

    The more rows of work have shown it, and the larger it is, the more of it is trusted.
    """
    doubt = DOUBT**2 + ROW_DOUBT**2 / max(min(num_rows, WINDOW_ROWS), 1)
    return difference**3 / (difference**2 + doubt)


def faded(difference: float, *, age_seconds: float, half_life_seconds: float) -> float:
    """Return the trusted value of a slow worker's `difference` of this age.

    It is whole for one half-life. Each further half-life halves it. A half-life of 0 keeps it for ever, as does a
    worker that is not slower than the median: fast workers get requests and keep measuring.
    """
    fading_seconds = age_seconds - half_life_seconds
    if difference <= 0 or fading_seconds <= 0 or not half_life_seconds:
        return difference
    return float(difference * 0.5 ** min(fading_seconds / half_life_seconds, 1e3))


class WorkerSpeed:
    """Measured slowness of one incarnation of a worker."""

    def __init__(self) -> None:
        self.slowness = 1.0
        """Trusted time of its steps, as a multiple of what the cluster's costs say."""
        self.relative = 1.0
        """The same as a multiple of the median worker's."""
        self.apparent = 1.0
        """The measured one, without doubt. The common fit divides by it."""
        self.num_rows = 0
        self.mean = 0.0
        """Average logarithm of its slowness over the last rows."""
        self.renewed_at = float("-inf")
        self.rows = WorkRows()

    def observe(self, measured: float, now: float) -> None:
        """Take the logarithm of one row's slowness into the average."""
        self.num_rows += 1
        self.renewed_at = now
        change = min(max(measured - self.mean, -LARGEST_CHANGE), LARGEST_CHANGE)
        self.mean += change / min(self.num_rows, WINDOW_ROWS)


class ClusterSpeeds:
    """Costs of work on the workers of one cluster, and the comparison of their speeds."""

    def __init__(self, *, half_life_seconds: float) -> None:
        """`half_life_seconds` is the time for which a slowness that is not renewed is trusted."""
        self.costs = StepCosts()
        self._half_life_seconds = half_life_seconds
        self._fitted_at = self._refreshed_at = float("-inf")

    def report(self, speed: WorkerSpeed, load: cluster_pb2.WorkerLoad, now: float) -> None:
        """Take the work of a worker's load report."""
        if not speed.rows.is_due(load.step_seconds):
            return
        row = speed.rows.take(_work(load))
        if row is None:
            return
        if now - self._fitted_at >= FIT_SECONDS or not self.costs.is_measured:
            self._fitted_at = now
            self.costs.observe(row, slowness=speed.apparent)
        expected_seconds = self.costs.seconds(row)
        if expected_seconds > 0:
            speed.observe(log(row.seconds / expected_seconds), now)

    def is_due(self, now: float) -> bool:
        """Return whether the last comparison is older than REFRESH_SECONDS."""
        return not 0 <= now - self._refreshed_at < REFRESH_SECONDS

    def refresh(self, speeds: Sequence[WorkerSpeed], now: float) -> None:
        """Compare the speeds of all ready workers, where that is due."""
        if not self.is_due(now):
            return
        self._refreshed_at = now
        middle = _median(speed.mean for speed in speeds if speed.num_rows)
        for speed in speeds:
            difference = 0.0
            if speed.num_rows:
                difference = faded(
                    shrunk(speed.mean - middle, speed.num_rows),
                    age_seconds=now - speed.renewed_at,
                    half_life_seconds=self._half_life_seconds,
                )
            speed.relative = exp(difference)
            speed.apparent = exp(speed.mean - middle) if speed.num_rows else 1.0
            speed.slowness = exp(middle + difference)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0


def _work(load: cluster_pb2.WorkerLoad) -> StepWork:
    return StepWork(
        seconds=load.step_seconds,
        steps=load.steps,
        prompt_steps=load.prompt_steps,
        prompt_tokens=load.step_prompt_tokens,
        excess_tokens=load.step_excess_tokens,
        decodes=load.step_decodes,
        context_tokens=load.step_context_tokens,
        pairs=load.step_pairs,
    )
