"""Engines of tiny models: requests for them, what each output gets, and the tokens that transformers gives.

A machine with a GPU has all that this needs: torch, safetensors and transformers.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockyard.proto.naming.block_hash import chain
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import Continuation, EngineRequest, SequenceOutput
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.startup.loading import load_engine

from .checkpoints import reference_greedy
from .scheduling import ROOT

DEMO = Path(__file__).parents[3] / "deploy/demo_model/checkpoint"
BLOCK_SIZE = 16
BYTES_PER_BLOCK = 2 * 3 * 2 * 16 * BLOCK_SIZE * 4
"""Keys and values in float32 of the 3 layers, 2 kv heads and 16 dimensions that models of checkpoints.py have."""
MIN_GAP = 1e-3

Outputs = dict[tuple[RequestId, int], list[SequenceOutput]]
"""The outputs of each output of each request, step by step."""


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(seed * 1000 + length)
    return tuple(chance.randrange(3, 270) for _ in range(length))


def names_of(prompt: Sequence[int], root: bytes = ROOT) -> list[BlockName]:
    return [BlockName(name) for name in (root, *chain(root, prompt, BLOCK_SIZE))]


def request_of(
    prompt: Sequence[int],
    *,
    params: SamplingParams | None = None,
    root: bytes = ROOT,
    continuations: tuple[Continuation, ...] = (),
    adapter: str = "",
    **sampling: Any,
) -> EngineRequest:
    """Return a request, which is greedy unless `params` or `sampling` says otherwise."""
    return EngineRequest(
        token_ids=list(prompt),
        prompt_length=len(prompt),
        names=names_of(prompt, root),
        sampling=params or SamplingParams(**({"temperature": 0.0} | sampling)),
        continuations=continuations,
        adapter=adapter,
    )


def submit(engine: Engine, prompt: Sequence[int], max_tokens: int = 12, **options: Any) -> RequestId:
    return engine.submit(request_of(prompt, max_tokens=max_tokens, **options))


def outputs_of(engine: Engine) -> Outputs:
    """Run an engine until nothing is left, and check every invariant after each step."""
    outputs: Outputs = {}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.scheduler.check_invariants()
    assert engine.pool.num_used == 0
    return outputs


def tokens_of(outputs: Sequence[SequenceOutput], already: int = 0) -> list[int]:
    """Return the tokens of one output, which began with `already` of them, and check their offsets."""
    tokens: list[int] = []
    for output in outputs:
        assert not output.token_ids or output.token_offset == already + len(tokens)
        tokens += output.token_ids
    return tokens


def run(engine: Engine) -> dict[RequestId, tuple[list[int], int]]:
    """Return the tokens of each request, all of which have one output, and its cached prompt tokens."""
    found = {}
    for (request_id, index), outputs in outputs_of(engine).items():
        assert index == 0
        assert all(output.token_ids for output in outputs)
        found[request_id] = tokens_of(outputs), outputs[-1].cached_tokens
    return found


def greedy(folder: Path, prompt: Sequence[int], num_tokens: int, min_gap: float = MIN_GAP) -> list[int]:
    """Return the tokens of transformers, and check that no rounding could excuse another one."""
    expected = reference_greedy(folder, tuple(prompt), num_tokens)
    assert expected.min_gap > min_gap, "the reference itself is undecided: choose another prompt"
    return list(expected.tokens)


def assert_greedy(folder: Path, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    assert list(tokens) == greedy(folder, prompt, len(tokens))


def config_of(folder: Path, *, num_blocks: int = 128, num_ranks: int = 1, **settings: Any) -> EngineConfig:
    """Return the config of one of several ranks. Each of them has one of the two kv heads."""
    memory = num_blocks * BYTES_PER_BLOCK // min(num_ranks, 2)
    return EngineConfig(**({"model": str(folder), "device": "cpu", "kv_cache_memory": memory} | settings))


def engine_of(folder: Path, **settings: Any) -> Engine:
    return load_engine(config_of(folder, **settings)).engine
