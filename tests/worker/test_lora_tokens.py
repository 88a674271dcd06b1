"""Tokens with an adapter equal those of a checkpoint with the adapter merged into its weights."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.startup.loading import LoadedEngine, load_engine

from .adapters import make_adapter, merge
from .checkpoints import reference_greedy, shared_checkpoint
from .test_engine_tokens import prompt_of

ARCHITECTURE = "Qwen3ForCausalLM"
MIN_GAP = 1e-3
NUM_TOKENS = 12
KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 4, "alpha": 8},
    {"rank": 8, "alpha": 4, "use_rslora": True},
    {"rank": 1, "alpha": 1, "modules": ("q_proj", "v_proj")},
    {"rank": 3, "alpha": 6, "modules": ("gate_proj", "down_proj", "o_proj")},
)
"""The adapters of the tests are of these kinds in turn."""


@cache
def files() -> tuple[TemporaryDirectory[str], Path]:
    folder = TemporaryDirectory(prefix="blockyard-adapters-")
    return folder, Path(folder.name)


@cache
def adapter(number: int) -> str:
    """Return the folder of an adapter, below `files()[1]`."""
    name = f"adapter-{number}"
    kind = KINDS[number % len(KINDS)]
    make_adapter(files()[1] / name, shared_checkpoint(ARCHITECTURE), seed=number, **kind)
    return name


@cache
def merged(number: int) -> Path:
    folder = files()[1] / f"merged-{number}"
    return merge(shared_checkpoint(ARCHITECTURE), files()[1] / adapter(number), folder)


def load(**settings: Any) -> LoadedEngine:
    config = EngineConfig(
        model=str(shared_checkpoint(ARCHITECTURE)),
        **({"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 22, "max_loras": 4} | settings),
        adapter_dir=str(files()[1]),
    )
    return load_engine(config)


def submit(loaded: LoadedEngine, number: int | None, prompt: Sequence[int], **sampling: Any) -> RequestId:
    fingerprint = ""
    if number is not None:
        assert loaded.adapters is not None
        content = loaded.adapters.read(adapter(number))
        loaded.engine.adapters.add(content)
        fingerprint = content.fingerprint
    root = root_name(
        cluster_secret="", model_fingerprint="x", block_size=16, kv_dtype="float32", adapter=fingerprint
    )
    names = [BlockName(name) for name in (root, *chain(root, prompt, 16))]
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": NUM_TOKENS} | sampling))
    return loaded.engine.submit(
        EngineRequest(
            token_ids=list(prompt),
            prompt_length=len(prompt),
            names=names,
            sampling=params,
            adapter=fingerprint,
        )
    )


def run(engine: Engine) -> dict[tuple[RequestId, int], tuple[int, ...]]:
    """Return the tokens of each output. No step may use more adapters than there are slots."""
    tokens: dict[tuple[RequestId, int], tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.token_ids
            key = output.request_id, output.index
            tokens[key] = tokens.get(key, ()) + output.token_ids
        engine.scheduler.check_invariants()
        resident = engine.load().adapters
        assert len(resident) <= engine.scheduler.config.max_loras
    return tokens


def expected(number: int | None, prompt: tuple[int, ...]) -> tuple[int, ...]:
    folder = shared_checkpoint(ARCHITECTURE) if number is None else merged(number)
    greedy = reference_greedy(folder, prompt, NUM_TOKENS)
    assert greedy.min_gap > MIN_GAP
    return greedy.tokens


MODES: dict[str, dict[str, Any]] = {
    "C++, recorded steps": {},
    "C++, kernel by kernel": {"enforce_eager": True},
    "steps overlap": {"overlap_steps": "on"},
    "deterministic": {"deterministic": True},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_tokens_equal_those_of_merged_weights_in_one_mixed_batch(mode: dict[str, Any]) -> None:
    loaded = load(max_loras=8, **mode)
    wanted = {}
    for number in (None, *range(8)):
        prompt = prompt_of(21 + (number or 0), seed=3)
        wanted[submit(loaded, number, prompt)] = expected(number, prompt)
    assert {key: tokens for (key, _), tokens in run(loaded.engine).items()} == wanted
