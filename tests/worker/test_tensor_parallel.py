"""A model that is divided among ranks gives the tokens of transformers, whatever happens to its blocks."""

from pathlib import Path
from typing import Any

import pytest
from blockyard.worker.config import EngineConfig
from blockyard.worker.sequences.identifiers import RequestId

from .checkpoints import ARCHITECTURES, shared_checkpoint
from .ranks import divided_engine
from .test_engine_tokens import BLOCK_SIZE, BYTES_PER_BLOCK, assert_greedy, prompt_of, run, submit

SIZES = (1, 2, 4)
"""Numbers of ranks. The tiny models have 2 kv heads: split between 2 ranks, replicated over 4."""


def config_of(checkpoint: Path, **settings: Any) -> EngineConfig:
    defaults = {"kv_cache_memory": 256 * BYTES_PER_BLOCK, "block_size": BLOCK_SIZE}
    return EngineConfig(model=str(checkpoint), device="cpu", **(defaults | settings))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_alone(architecture: str, size: int) -> None:
    checkpoint = shared_checkpoint(architecture)
    with divided_engine(config_of(checkpoint), size) as engine:
        submit(engine, prompt_of(37), 20)
        assert_greedy(checkpoint, prompt_of(37), run(engine)[RequestId(0)][0])
