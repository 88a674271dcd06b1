"""An engine with a simulated runner in virtual time."""

from typing import Any

from blockyard.proto.naming.block_hash import chain
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest, SequenceOutput
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.simulated.runner import SimulatedRunner

from .scheduling import ROOT


class Clock:
    """Virtual time: the simulated runner's sleep moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_engine(
    clock: Clock | None = None,
    runner: type[SimulatedRunner] = SimulatedRunner,
    num_blocks: int = 64,
    *,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    """Return an engine whose steps take 0.1 s and a millisecond for each token of a prompt."""
    clock = clock or Clock()
    simulated = runner(vocab_size=100, prefill_tokens_per_second=1000.0, step_seconds=0.1, sleep=clock.sleep)
    scheduling = SchedulerConfig(**({"max_model_len": 512, "max_num_seqs": 256} | (config or {})))
    return Engine(scheduling, simulated, num_blocks=num_blocks, clock=clock, **settings)


def request(
    length: int = 20,
    *,
    max_tokens: int = 5,
    deadline: float | None = None,
    priority: int = 0,
    token: int = 7,
    **sampling: Any,
) -> EngineRequest:
    return EngineRequest(
        token_ids=[token] * length,
        prompt_length=length,
        names=[BlockName(name) for name in (ROOT, *chain(ROOT, [token] * length, 16))],
        sampling=SamplingParams(max_tokens=max_tokens, seed=length, **sampling),
        deadline_seconds=deadline,
        priority=priority,
    )


def outputs_of(engine: Engine) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs
