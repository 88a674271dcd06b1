"""Seeded loads for the textbook figures, and a loop that drives the real scheduler through them.

Owns the loads, the loop around a scheduler, and the counts at each of its steps. The model is simulated
(SimulatedRunner, without waiting). Scheduler, pool and prefix cache are the engine's own. Needs no torch.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.worker.scheduling.commit import Update
from blockyard.worker.scheduling.scheduler import Scheduler, SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockId, BlockName, RequestId, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import StepPlan
from blockyard.worker.simulated.runner import SimulatedRunner

BLOCK_SIZE = 16
MIXED_OUTPUTS = (32, 128, 64, 256)
MIXED_PROMPTS = (20, 200)
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request for `num_output_tokens` tokens after a prompt. It arrives before step `arrival` is planned."""

    number: int
    prompt: tuple[int, ...]
    num_output_tokens: int
    arrival: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the complete output."""
        return len(self.prompt) + self.num_output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counts at one step.

    `tokens` is the number of tokens with KV, `taken` the number of token slots that sequences hold, and `memory` the
    number of all token slots.
    """

    step: int
    running: int
    waiting: int
    tokens: int
    taken: int
    memory: int


def random_tokens(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(VOCABULARY) for _ in range(count))


def mixed(count: int, *, mean_steps_between: float = 0.0, seed: int = 0) -> list[Request]:
    """Make requests with prompts of 20 to 200 tokens that share nothing, and outputs that cycle 32, 128, 64, 256.

    They arrive all at once, or, if `mean_steps_between` is above 0, as a Poisson process.
    """
    chance = random.Random(seed)
    requests, arrival = [], 0.0
    for number, num_output_tokens in enumerate(islice(cycle(MIXED_OUTPUTS), count)):
        prompt = random_tokens(chance, chance.randint(*MIXED_PROMPTS))
        request = Request(
            number=number, prompt=prompt, num_output_tokens=num_output_tokens, arrival=int(arrival)
        )
        requests.append(request)
        if mean_steps_between:
            arrival += chance.expovariate(1 / mean_steps_between)
    return requests


class Drive:
    """Real scheduler with a simulated model. `step` plans and runs one step, with `plan` and `finish`."""

    def __init__(self, num_blocks: int, *, block_size: int = BLOCK_SIZE, **settings: Any) -> None:
        self.block_size = block_size
        defaults = {"max_num_batched_tokens": 8192, "max_model_len": min(num_blocks * block_size, 4096)}
        config = SchedulerConfig(block_size=block_size, **(defaults | settings))
        self.scheduler = Scheduler(config, num_blocks=num_blocks)
        self.sequences: list[Sequence] = []
        self._root = root_name(
            cluster_secret="", model_fingerprint="figures", block_size=block_size, kv_dtype="none"
        )
        self._model = SimulatedRunner(
            vocab_size=VOCABULARY, prefill_tokens_per_second=1.0, step_seconds=0.0, sleep=lambda seconds: None
        )

    def submit(self, prompt: Iterable[int], num_output_tokens: int, **sampling: Any) -> Sequence:
        number, tokens = len(self.sequences), list(prompt)
        params = SamplingParams(max_tokens=num_output_tokens, **sampling)
        sequence = Sequence(
            sequence_id=SequenceId(number),
            tokens=token_array(tokens),
            prompt_length=len(tokens),
            sampling=params,
            names=[BlockName(name) for name in (self._root, *chain(self._root, tokens, self.block_size))],
            arrival=number,
            request_id=RequestId(number),
            num_outputs=1 if params.beam_width else params.n,
        )
        self.sequences.append(sequence)
        self.scheduler.submit(sequence)
        return sequence

    def plan(self) -> StepPlan:
        return self.scheduler.plan()

    def finish(self, plan: StepPlan) -> list[Update]:
        return self.scheduler.commit(plan, self._model.execute(plan))

    def step(self) -> list[Update]:
        return self.finish(self.plan())

    def sample(self, step: int) -> Sample:
        """Return the counts of a step that runs: call it between `plan` and `finish`. Cached blocks count as free."""
        fill = self.block_fill()
        return Sample(
            step=step,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            tokens=sum(fill.values()),
            taken=self.scheduler.pool.num_used * self.block_size,
            memory=self.scheduler.pool.num_blocks * self.block_size,
        )

    def block_fill(self) -> dict[BlockId, int]:
        """Return the number of tokens in each block that running sequences hold. A shared block counts once."""
        fill: dict[BlockId, int] = {}
        for sequence in self.scheduler.running:
            for index, block in enumerate(sequence.block_table):
                tokens = min(self.block_size, sequence.num_scheduled - index * self.block_size)
                fill[block] = max(fill.get(block, 0), tokens)
        return fill


def share(tokens: Iterable[float], of: Iterable[float]) -> float:
    """Return the sum of `tokens` as a share of the sum of `of`."""
    return sum(tokens) / sum(of)


def mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)
