"""Profile of the engine that Dynamo's own simulator assumes, to compare both simulators on the same arrivals.

This is its "polynomial" timing, found by experiments with ai-dynamo-runtime 1.6.1 (bench/peers/dynamo.py). Prompts of n
new tokens in a pass take `4.21e-7 n^2 + 0.01518 n + 16.5` ms. Decodes take `-25.74 a^2 + 54.01 a + 5.74` ms if their
contexts sum to the fraction a of the pool. `speedup_ratio` divides both.
"""

from dataclasses import dataclass

from blockyard.worker.sequences.step_plan import StepPlan

from bench.placement.simulation.profile import HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class MockerProfile(HardwareProfile):
    """Profile of Dynamo's mock engine.

    With the default settings, Dynamo's router reaches a reuse of 0.463 / 0.709 at 3 / 10 requests per second of the
    shared-prefix load, and round robin reaches 0.200 / 0.289.
    """

    name: str = "Dynamo's mock engine"
    pool_blocks: int = 25_000
    speedup_ratio: float = 0.5
    max_model_len: int = 16_384
    mixed_step_seconds: float | None = None
    """None, because Dynamo's mock engine has no such limit."""

    @property
    def num_blocks(self) -> int:
        return self.pool_blocks

    def step_seconds(self, plan: StepPlan) -> float:
        new_tokens = context_tokens = 0
        for row in plan.rows:
            if row.num_tokens == 1:
                context_tokens += row.end
            else:
                new_tokens += row.num_tokens
        milliseconds = 0.0
        if new_tokens:
            milliseconds += 4.209989e-07 * new_tokens**2 + 1.518344e-02 * new_tokens + 16.50142
        if context_tokens:
            active = min(1.0, context_tokens / (self.pool_blocks * self.block_size))
            milliseconds += max(1.0, -25.74 * active**2 + 54.01 * active + 5.74)
        return milliseconds / self.speedup_ratio / 1000
