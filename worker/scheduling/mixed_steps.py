"""Mixed-step controller: measures steps and limits the prompt tokens of a step that also decodes.

Owns the measured rates, the sum of all work, and the limit. The engine reports each step, and the scheduler asks for
each step's budget. Does not own clocks or choose rows.
"""

from dataclasses import dataclass
from math import inf

from blockyard.proto.step_costs import EXCESS_FROM_TOKENS, StepCosts, StepWork, WorkRows, pairs_of
from blockyard.worker.scheduling.decode_times import DecodeTimes
from blockyard.worker.sequences.step_plan import StepPlan

SMOOTHING = 0.2
"""Weight of the newest step in each moving average."""
FIRST_CHUNK_TOKENS = 256
"""The limit in prompt tokens before the first mixed step was measured."""
MIN_CHUNK_TOKENS = 16
"""The lowest limit in prompt tokens, so that prompts always make progress."""


@dataclass(slots=True)
class Rates:
    """Measured speeds of one engine. 0 means not measured yet."""

    prefill_tokens_per_second: float = 0.0
    """Rate of a step at the reference size of proto/step_costs.py, fitted to all steps."""
    seconds_per_pair: float = 0.0
    """Time of attention, beside the time that follows from the rate above."""
    decode_tokens_per_second: float = 0.0
    swap_blocks_per_second: float = 0.0
    """Blocks that go to host memory and come back: one round trip counts once."""


class MixedStepController:
    """Keeps the time that prompts add to a step with decodes near `target_seconds`.

    After each mixed step the limit is scaled by the ratio of the target to the time that its prompts took. The ratio is
    kept between a half and five quarters. The prompts' time is the step's, less the expected time of its decodes alone.
    """

    def __init__(self, *, target_seconds: float | None = None, max_batched_tokens: int) -> None:
        """Without `target_seconds` there is no limit. The limit never exceeds `max_batched_tokens`."""
        self.rates = Rates()
        self.decode_times = DecodeTimes(smoothing=SMOOTHING)
        self.work = StepWork()
        """The sum over all steps since the start."""
        self._costs, self._rows = StepCosts(), WorkRows()
        self.limit_tokens = None if target_seconds is None else FIRST_CHUNK_TOKENS
        """Most prompt tokens of a step that also decodes. None: the token budget alone limits them."""
        self._target_seconds = target_seconds
        self._max_batched_tokens = max_batched_tokens
        self._measures_decodes = False
        """Whether the next step that decodes takes no prompt, so that its decodes are measured alone."""

    def prefill_budget(self, budget: int, *, has_decodes: bool) -> int:
        """Return how many of `budget` tokens the step that is planned may spend on prompts. Call it once a step.

        It is 0 where the decodes of this step are to be measured alone.
        """
        measures_decodes, self._measures_decodes = self._measures_decodes, False
        if not has_decodes or self.limit_tokens is None:
            return budget
        return 0 if measures_decodes else min(budget, self.limit_tokens)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Update rates, decode times and limit from the time of a step that succeeded. Ignore a time of 0 or less."""
        if not 0 < seconds < inf:
            return
        prefill, decodes = self._measure(plan, seconds)
        if decodes and not prefill:
            rate = self.rates.decode_tokens_per_second
            self.rates.decode_tokens_per_second = _smooth(rate, (decodes - plan.num_drafts) / seconds)
            self.decode_times.observe(decodes, seconds)
        if decodes and prefill:
            self._measures_decodes = self.decode_times.wants_measuring(decodes)
            self._limit(prefill, seconds - self.decode_times.expected(decodes))

    def _measure(self, plan: StepPlan, seconds: float) -> tuple[int, int]:
        """Add a step to the sum of all work, and fit the rates to it. Return its prompt tokens and its decodes."""
        prefill = decodes = context = pairs = 0
        for row in plan.rows:
            if row.num_tokens == 1:
                decodes += 1
                context += row.end
            else:
                prefill += row.num_tokens
                pairs += pairs_of(row.start, row.num_tokens)
        excess = max(0, prefill + decodes - EXCESS_FROM_TOKENS)
        self.work = self.work.plus(
            StepWork(seconds, 1, prefill > 0, prefill, excess, decodes, context, pairs)
        )
        row_of_work = self._rows.take(self.work)
        if row_of_work is not None:
            self._costs.observe(row_of_work)
            self.rates.prefill_tokens_per_second = self._costs.tokens_per_second
            self.rates.seconds_per_pair = self._costs.seconds_per_pair
        return prefill, decodes

    def _limit(self, prefill: int, seconds: float) -> None:
        """Adjust the limit to the `seconds` that `prefill` tokens took, which grow with the context before them.

        `seconds` is negative where the decodes alone were expected to take longer than the whole step.
        """
        if self.limit_tokens is None or self._target_seconds is None:
            return
        change = self._target_seconds / max(seconds, 0.1 * self._target_seconds)
        if change < 1.0:
            shrunk = int(min(self.limit_tokens, prefill) * max(change, 0.5))
            self.limit_tokens = max(MIN_CHUNK_TOKENS, shrunk)
        elif prefill >= self.limit_tokens // 2:
            grown = int(self.limit_tokens * min(change, 1.25)) + 1
            self.limit_tokens = min(self._max_batched_tokens, grown)

    def forget_measurements(self) -> None:
        """Forget the work, the rates of steps and the times of decodes. The limit and the rate of swapping stay."""
        self.rates = Rates(swap_blocks_per_second=self.rates.swap_blocks_per_second)
        self.work, self._costs, self._rows = StepWork(), StepCosts(), WorkRows()
        self.decode_times = DecodeTimes(smoothing=SMOOTHING)


def _smooth(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)
