"""Step costs: how long a step takes for its work, fitted to measured steps.

    seconds = steps + prompt steps + prompt tokens + excess tokens + decodes + context tokens + pairs

Each of them counts times its cost.

A rate in tokens per second would measure the batch: a worker with small steps or long contexts would look slow. With
these costs, workers are compared by their times for equal work. The sum is linear, so it holds for one step and for the
sums over many. Owns the counts of work and the fit. Pure; does not own clocks, or whose costs are compared.
"""

from math import isfinite
from typing import NamedTuple, Self

EXCESS_FROM_TOKENS = 256
"""Tokens of a step beyond this number are excess tokens. The first ones cost less where a step is bound by memory."""
REFERENCE_PROMPT_TOKENS = 1024
"""Size of the step without decodes and context whose time per token is the reported rate."""
ROW_SECONDS = 0.1
"""Measured steps are added up to at least this time. It evens out noise and bounds the cost of measuring."""
FIRST_ROW_SECONDS = 0.001
"""The same for the first row, so that the trial of a new worker counts."""
WINDOW_ROWS = 10_000
"""Rows after which a measurement has lost most of its weight."""
PRIOR_ROWS = 0.05
"""Weight of the assumed proportions between the costs, in rows."""
SETTLED_ROWS = 16
"""Rows from which a time that is far from the expected one counts as less far."""
LARGEST_RATIO = 2.0
"""Largest ratio, after that, of a row's time to the expected time, and of the expected time to it."""
SWEEPS = 40
"""Passes of the coordinate descent."""
PROPORTIONS = (100.0, 100.0, 0.5, 0.5, 1.0, 1 / 512, 1 / 16_384)
"""Assumed costs in prompt tokens, before steps have shown more: of a step, and of what it computes."""


class StepWork(NamedTuple):
    """Work of one step or of several, and its time."""

    seconds: float = 0.0
    steps: int = 0
    prompt_steps: int = 0
    """Steps with a row of more than one token."""
    prompt_tokens: int = 0
    """Tokens in rows of more than one token."""
    excess_tokens: int = 0
    """Tokens of any row beyond the first EXCESS_FROM_TOKENS of a step."""
    decodes: int = 0
    """Rows of one token."""
    context_tokens: int = 0
    """Tokens that decodes read: their contexts."""
    pairs: int = 0
    """Prompt tokens times the tokens that each of them attends to."""

    def since(self, earlier: Self) -> "StepWork":
        """Return the work after `earlier`, of which this is the continued sum."""
        return StepWork(*(now - before for now, before in zip(self, earlier, strict=True)))  # type: ignore[arg-type]

    def plus(self, other: "StepWork") -> "StepWork":
        return StepWork(*(one + another for one, another in zip(self, other, strict=True)))  # type: ignore[arg-type]

    @property
    def is_valid(self) -> bool:
        """Whether this can be the work of steps. Workers may report any number."""
        return 0 < self.seconds < 1e9 and all(isfinite(count) and 0 <= count < 1e18 for count in self)


def pairs_of(start: int, num_tokens: int) -> int:
    """Return the pairs of `num_tokens` prompt tokens that begin at position `start`."""
    return num_tokens * (2 * start + num_tokens) // 2


class WorkRows:
    """Cuts the running sum of a machine's work into rows that are long enough to measure."""

    def __init__(self) -> None:
        self._taken = StepWork()
        self._row_seconds = FIRST_ROW_SECONDS

    def is_due(self, seconds: float) -> bool:
        """Return whether a sum with this time holds another row, or is none that continues."""
        return not 0 <= seconds - self._taken.seconds < self._row_seconds

    def take(self, total: StepWork) -> StepWork | None:
        """Return the work since the last row, or None if it is too short. Begin anew at a smaller sum."""
        if not self.is_due(total.seconds) or not total.is_valid:
            return None
        row, self._taken = total.since(self._taken), total
        if not row.is_valid:
            return None
        self._row_seconds = ROW_SECONDS
        return row


class StepCosts:
    """Costs of work by least squares of the relative error: none is negative, and old measurements fade.

    Where measured steps leave proportions open, they stay near PROPORTIONS.
    """

    def __init__(self) -> None:
        self.costs = (0.0,) * len(PROPORTIONS)
        """Seconds of each count of StepWork, in their order. 0 until measured."""
        self.num_rows = 0
        self._products = [[0.0] * len(PROPORTIONS) for _ in PROPORTIONS]
        """Weighted sums of products of counts, in units of PROPORTIONS."""
        self._sums = [0.0] * len(PROPORTIONS)
        self._solved_at_row = 0

    @property
    def is_measured(self) -> bool:
        return self.num_rows > 0

    def observe(self, row: StepWork, *, slowness: float = 1.0) -> None:
        """Add measured steps of a machine that takes `slowness` times as long as others. Ignore invalid work."""
        if not row.is_valid:
            return
        seconds = row.seconds / slowness
        scale, target = 1.0 / seconds, 1.0
        expected = self.seconds(row)
        if self.num_rows >= SETTLED_ROWS and expected > 0:
            scale = 1.0 / expected
            target = min(max(seconds * scale, 1 / LARGEST_RATIO), LARGEST_RATIO)
        counts = [count * unit * scale for count, unit in zip(row[1:], PROPORTIONS, strict=True)]
        keep = 1.0 - 1.0 / WINDOW_ROWS
        for number, count in enumerate(counts):
            products = self._products[number]
            for other, other_count in enumerate(counts):
                products[other] = keep * products[other] + count * other_count
            self._sums[number] = keep * self._sums[number] + count * target
        self.num_rows += 1
        if self.num_rows <= SETTLED_ROWS or self.num_rows - self._solved_at_row >= SETTLED_ROWS:
            self._solve()

    def seconds(self, work: StepWork) -> float:
        """Return the expected time of this work."""
        return sum(cost * count for cost, count in zip(self.costs, work[1:], strict=True))

    @property
    def seconds_per_token(self) -> float:
        """Seconds per prompt token of a step with REFERENCE_PROMPT_TOKENS of them, without attention."""
        step, prompt_step, token, excess, *_ = self.costs
        excess_share = 1 - EXCESS_FROM_TOKENS / REFERENCE_PROMPT_TOKENS
        return (step + prompt_step) / REFERENCE_PROMPT_TOKENS + token + excess * excess_share

    @property
    def tokens_per_second(self) -> float:
        """The rate in prompt tokens of that step, 0 until measured."""
        seconds = self.seconds_per_token
        return 1 / seconds if seconds > 0 else 0.0

    @property
    def seconds_per_pair(self) -> float:
        return self.costs[-1]

    @property
    def pair_tokens(self) -> float:
        """The time of a pair as a part of the time of a prompt token."""
        return self.seconds_per_pair * self.tokens_per_second

    def decode_seconds(self, sequences: float, context_tokens: float) -> float:
        """Return the time of a step that decodes `sequences` sequences, which read `context_tokens` together."""
        step, _, _, excess, decode, context, _ = self.costs
        return (
            step
            + decode * sequences
            + excess * max(0, sequences - EXCESS_FROM_TOKENS)
            + context * context_tokens
        )

    def _solve(self) -> None:
        """Minimise the squared errors plus PRIOR_ROWS * (cost / common cost - 1)^2 for each cost, by coordinates."""
        self._solved_at_row = self.num_rows
        numbers = range(len(PROPORTIONS))
        total = sum(map(sum, self._products))
        common = sum(self._sums) / total if total > 0 else 0.0
        if not (isfinite(common) and common > 0):
            return
        pull = PRIOR_ROWS / common**2
        found = [cost / unit for cost, unit in zip(self.costs, PROPORTIONS, strict=True)]
        if not any(found):
            found = [common] * len(PROPORTIONS)
        for _ in range(SWEEPS):
            for number in numbers:
                products = self._products[number]
                rest = self._sums[number] + pull * common
                rest -= sum(products[other] * found[other] for other in numbers if other != number)
                found[number] = max(0.0, rest / (products[number] + pull))
        self.costs = tuple(cost * unit for cost, unit in zip(found, PROPORTIONS, strict=True))
