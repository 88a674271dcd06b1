"""Mixed-step controller: measures steps and limits the prompt tokens of a step that also decodes.

Owns the measured rates and the limit. The engine reports each step, and the scheduler asks for each step's budget.
Does not own clocks or choose rows.
"""

from dataclasses import dataclass

from blockyard.worker.scheduling.decode_times import DecodeTimes
from blockyard.worker.sequences.step_plan import StepPlan

SMOOTHING = 0.2
"""Weight of the newest step in each moving average."""
MIN_MEASURED_PREFILL_TOKENS = 64
"""Prompt tokens of a step whose rate counts. With fewer, the overhead of the step would be measured."""
FIRST_CHUNK_TOKENS = 256
"""The limit in prompt tokens before the first mixed step was measured."""
MIN_CHUNK_TOKENS = 16
"""The lowest limit in prompt tokens, so that prompts always make progress."""


@dataclass(slots=True)
class Rates:
    """Measured speeds of one engine. 0 means not measured yet."""

    prefill_tokens_per_second: float = 0.0
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
        prefill = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        decodes = sum(row.num_tokens == 1 for row in plan.rows)
        if seconds <= 0:
            return
        rates = self.rates
        if prefill >= MIN_MEASURED_PREFILL_TOKENS:
            rates.prefill_tokens_per_second = _smooth(
                rates.prefill_tokens_per_second, plan.num_tokens / seconds
            )
        elif decodes and not prefill:
            rates.decode_tokens_per_second = _smooth(rates.decode_tokens_per_second, decodes / seconds)
            self.decode_times.observe(decodes, seconds)
        if decodes and prefill:
            self._measures_decodes = self.decode_times.wants_measuring(decodes)
            self._limit(prefill, seconds - self.decode_times.expected(decodes))

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
        """Forget the rates of steps and the times of decodes. The limit and the rate of swapping stay."""
        self.rates.prefill_tokens_per_second = self.rates.decode_tokens_per_second = 0.0
        self.decode_times = DecodeTimes(smoothing=SMOOTHING)


def _smooth(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)
