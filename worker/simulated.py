"""A runner whose model is a clock: same scheduler, pool, prefix cache and session, no weights.

Makes clusters of many workers testable on two cores. A step takes `step_seconds` plus its prefill tokens at
`prefill_tokens_per_second`; the tokens are a function of (seed, position), so that a replay elsewhere agrees.
"""

import time
from collections.abc import Callable
from hashlib import blake2b

from blockyard.worker.scheduler import NO_TOKEN
from blockyard.worker.sequence import ScheduledRow, StepPlan


class SimulatedRunner:
    """Implements `Runner`. `sleep` may move a virtual clock instead of waiting."""

    def __init__(
        self,
        *,
        vocab_size: int,
        prefill_tokens_per_second: float,
        step_seconds: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._vocab_size = vocab_size
        self._prefill_rate = prefill_tokens_per_second
        self._step_seconds = step_seconds
        self._sleep = sleep

    def warm_up(self) -> None:
        """Nothing to warm: the clock is exact from its first step."""

    def execute(self, plan: StepPlan) -> list[int]:
        """Waits as long as the step would take; one token a row that samples."""
        prefill_tokens = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        self._sleep(self._step_seconds + prefill_tokens / self._prefill_rate)
        return [self._token(row) if row.samples else NO_TOKEN for row in plan.rows]

    def _token(self, row: ScheduledRow) -> int:
        key = f"{row.sequence.sampling.seed}:{row.end}".encode()
        token = int.from_bytes(blake2b(key, digest_size=4).digest(), "little") % self._vocab_size
        ends = row.sequence.sampling.eos_token_ids | row.sequence.sampling.stop_token_ids
        while token in ends and len(ends) < self._vocab_size:
            token = (token + 1) % self._vocab_size
        return token
