"""Simulated runner: its model is a clock. Scheduler, pool, prefix cache and session are the real ones, without weights.

It makes clusters of many workers testable on two cores. A step takes `step_seconds` plus its prefill tokens at
`prefill_tokens_per_second`. The tokens are a function of (seed, position, index of the output), so that a replay
elsewhere agrees. All tokens have equal probability, so every logprob is known in advance. Only beams differ: each
candidate of a beam is half as probable as the one before.
"""

import math
import struct
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from blockyard.worker.sequences.beams import num_candidates
from blockyard.worker.sequences.prompt_scoring import scored_positions
from blockyard.worker.sequences.sequence import TokenLogprob
from blockyard.worker.sequences.step_plan import (
    FAILED_TOKEN,
    NO_TOKEN,
    RowExtras,
    ScheduledRow,
    StepPlan,
    StepTokens,
)
from blockyard.worker.simulated.faults import SimulatedFault
from blockyard.worker.simulated.memory import SimulatedMemory

if TYPE_CHECKING:
    from blockyard.worker.simulated.grammars import SimulatedGrammars

ADAPTER_BYTES_PER_SECOND = 2e9
"""Rate at which adapters reach the simulated device."""


class _Later:
    """Implements `PendingStep`. Its tokens depend on nothing that another step may change."""

    def __init__(self, runner: "SimulatedRunner", plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def result(self) -> StepTokens:
        return self._runner.execute(self._plan)


class SimulatedRunner:
    """Implements `StartingRunner`. `sleep` may move a virtual clock instead of waiting."""

    def __init__(
        self,
        *,
        vocab_size: int,
        prefill_tokens_per_second: float,
        step_seconds: float,
        embedding_size: int = 1,
        sleep: Callable[[float], None] = time.sleep,
        fault: SimulatedFault | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._embedding_size = embedding_size
        self._prefill_rate = prefill_tokens_per_second
        self._step_seconds = step_seconds
        self._sleep = sleep
        self._fault = fault
        self._slots: dict[int, str] = {}
        """Fingerprint of the adapter in each slot."""
        self.transferable = SimulatedMemory()
        self.grammars: SimulatedGrammars | None = None
        """None: outputs follow no grammar."""

    def warm_up(self) -> None:
        """Do nothing: the clock is exact from its first step."""

    def start(self, plan: StepPlan) -> "_Later":
        """Begin a step. The clock moves when the result is asked for."""
        return _Later(self, plan)

    def execute(self, plan: StepPlan) -> StepTokens:
        """Wait as long as the step would take, and return its tokens. Blocks move in no time."""
        if self.grammars is not None:
            self.grammars.forget(plan.ended)
        if not plan.rows:
            return StepTokens(tokens=[])
        loads = self._load(plan)
        prefill_tokens = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        self._sleep(self._step_seconds + prefill_tokens / self._prefill_rate)
        spoilt = self._fault.strike(plan.rows) if self._fault is not None else frozenset()
        drawn = self._drawn(plan.rows)
        for index in spoilt:
            drawn[index] = [FAILED_TOKEN]
        extras = {
            index: self._extras(row, drawn[index])
            for index, row in enumerate(plan.rows)
            if index not in spoilt
        }
        return StepTokens(
            tokens=[tokens[0] if tokens else NO_TOKEN for tokens in drawn],
            extras={index: extra for index, extra in extras.items() if extra != RowExtras()},
            adapter_seconds=loads,
        )

    def _load(self, plan: StepPlan) -> dict[str, float]:
        """Wait as long as the adapters that are not in their slots take, and return the time of each."""
        loads: dict[str, float] = {}
        for slot, adapter in plan.adapters:
            if self._slots.get(slot) != adapter.fingerprint:
                self._slots[slot] = adapter.fingerprint
                loads[adapter.fingerprint] = adapter.num_bytes / ADAPTER_BYTES_PER_SECOND
        if loads:
            self._sleep(sum(loads.values()))
        return loads

    def _drawn(self, rows: Sequence[ScheduledRow]) -> list[list[int]]:
        drawn = [self._tokens(row) for row in rows]
        followed = [
            index for index, row in enumerate(rows) if row.samples and row.sequence.grammar is not None
        ]
        if self.grammars is not None and followed:
            chosen = self.grammars.chosen([rows[index] for index in followed], [drawn[i] for i in followed])
            for index, tokens in zip(followed, chosen, strict=True):
                drawn[index] = tokens
        return drawn

    def _tokens(self, row: ScheduledRow) -> list[int]:
        if row.num_outputs > 1:
            return [self._token(row, output) for output in range(row.num_outputs)]
        return [self._token(row, row.sequence.index)] if row.samples else []

    def _token(self, row: ScheduledRow, index: int) -> int:
        sampling = row.sequence.sampling
        # A beam's candidates must not depend on the index of the beam.
        suffix = f":{index}" if index and not sampling.beam_width else ""
        key = f"{sampling.seed}:{row.end}{suffix}".encode()
        token = int.from_bytes(blake2b(key, digest_size=4).digest(), "little") % self._vocab_size
        ends = sampling.eos_token_ids | sampling.stop_token_ids
        while token in ends and len(ends) < self._vocab_size:
            token = (token + 1) % self._vocab_size
        return token

    def _extras(self, row: ScheduledRow, tokens: list[int]) -> RowExtras:
        sampling = row.sequence.sampling
        prompt = [row.sequence.tokens[position + 1] for position in scored_positions(row)]
        return RowExtras(
            tokens=tuple(tokens[1:]),
            logprobs=() if sampling.logprobs is None else self._logprobs(tokens, sampling.logprobs),
            prompt_logprobs=self._logprobs(prompt, sampling.prompt_logprobs or 0),
            candidates=self._candidates(row, tokens[0]) if sampling.beam_width and tokens else (),
            embedding=self._embedding(row) if row.embeds else b"",
        )

    def _embedding(self, row: ScheduledRow) -> bytes:
        """Return a vector of length 1 that has one number other than 0. The prompt's tokens decide which."""
        digest = blake2b(row.sequence.tokens.tobytes(), digest_size=8).digest()
        place = int.from_bytes(digest, "little") % self._embedding_size
        return struct.pack(
            f"<{self._embedding_size}f", *(float(i == place) for i in range(self._embedding_size))
        )

    def _logprobs(self, tokens: list[int], num_top: int) -> tuple[TokenLogprob, ...]:
        logprob = -math.log(self._vocab_size)
        top = tuple((token, logprob) for token in range(min(num_top, self._vocab_size)))
        return tuple(TokenLogprob(token, logprob, 1, top) for token in tokens)

    def _candidates(self, row: ScheduledRow, first: int) -> tuple[tuple[int, float], ...]:
        width = min(num_candidates(row.sequence.sampling), self._vocab_size)
        return tuple(((first + i) % self._vocab_size, -(i + 1) * math.log(2)) for i in range(width))
