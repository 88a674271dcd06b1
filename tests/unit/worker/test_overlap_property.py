"""Engines whose steps overlap, over requests, cancels and faults in any order."""

import random
from contextlib import suppress
from typing import Any

from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest, SequenceOutput
from blockyard.worker.scheduling.scheduler import CapacityError, SchedulerConfig
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.sequence import SequenceState
from blockyard.worker.simulated.faults import SimulatedFault
from blockyard.worker.simulated.runner import SimulatedRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .token_engines import BLOCK_SIZE, outputs_of, request_of, tokens_of

MARKER = 66


def engine_of(
    fault: SimulatedFault | None = None, *, num_blocks: int = 64, overlap: bool, **config: Any
) -> Engine:
    settings = SchedulerConfig(max_model_len=min(512, num_blocks * BLOCK_SIZE), max_num_seqs=8, **config)
    timing: dict[str, Any] = {"prefill_tokens_per_second": 1e6, "step_seconds": 0.0, "sleep": lambda _: None}
    runner = SimulatedRunner(vocab_size=64, fault=fault, **timing)
    return Engine(settings, runner, num_blocks=num_blocks, overlap_steps=overlap)


@examples(30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 30),
    fault=st.sampled_from([None, "raise", "nan"]),
)
def test_no_order_of_submits_cancels_and_faults_changes_what_the_others_get(
    seed: int, num_blocks: int, fault: Any
) -> None:
    chance = random.Random(seed)
    engine = engine_of(
        SimulatedFault(token=MARKER, kind=fault) if fault else None,
        overlap=True,
        num_blocks=num_blocks,
        swap_blocks=chance.choice([0, 10]),
        host_cache_blocks=chance.choice([0, 6]),
    )
    requests: dict[RequestId, EngineRequest] = {}
    cancelled: set[RequestId] = set()
    outputs: dict[RequestId, list[SequenceOutput]] = {}
    for _ in range(60):
        if chance.random() < 0.3:
            submitted = _random_request(chance, most_tokens=num_blocks * BLOCK_SIZE)
            with suppress(CapacityError):
                requests[engine.submit(submitted)] = submitted
        if requests and chance.random() < 0.05:
            leaving = chance.choice(list(requests))
            cancelled.add(leaving)
            engine.cancel(leaving)
        _collect(engine, outputs)
    while engine.has_work:
        _collect(engine, outputs)
    assert engine.pool.num_used == 0
    for key, submitted in requests.items():
        failed = _check_tokens(submitted, outputs.get(key, []), is_cut=key in cancelled)
        # Of a step that raised those end too who read what a marked prompt was to fill in it.
        assert not failed or fault == "raise" or (fault == "nan" and MARKER in submitted.token_ids)


def _random_request(chance: random.Random, most_tokens: int) -> EngineRequest:
    max_tokens = chance.randint(1, 30)
    tokens = [chance.randint(1, 2)] * chance.choice([16, 32]) + [3] * chance.randint(1, 40)
    tokens = tokens[: most_tokens - max_tokens]
    if chance.random() < 0.05:
        tokens[chance.randrange(len(tokens))] = MARKER
    kind = chance.choice([{}, {}, {"n": 2}, {"logprobs": 1}, {"beam_width": 2}])
    return request_of(tokens, max_tokens=max_tokens, seed=len(tokens), temperature=1.0, **kind)


def _collect(engine: Engine, outputs: dict[RequestId, list[SequenceOutput]]) -> None:
    for output in engine.step().outputs:
        outputs.setdefault(output.request_id, []).append(output)
    engine.scheduler.check_invariants()


def _check_tokens(submitted: EngineRequest, got: list[SequenceOutput], *, is_cut: bool) -> bool:
    """Whether it failed; its tokens are those it gets alone, as far as it got."""
    alone = engine_of(overlap=False)
    alone.submit(submitted)
    expected = {index: tokens_of(outputs) for (_, index), outputs in outputs_of(alone).items()}
    found = {index: tokens_of([o for o in got if o.index == index]) for index in {o.index for o in got}}
    failed = any(output.state is SequenceState.FAILED for output in got)
    assert is_cut or failed or found.keys() == expected.keys()
    for index, tokens in found.items():
        assert tokens == expected[index][: len(tokens)]
        assert is_cut or failed or len(tokens) == len(expected[index])
    return failed
