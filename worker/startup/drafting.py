"""Drafting at start: reads the draft model, finds its share of the memory for the KV cache, and loads it.

To read it takes no torch, as checks before a start need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.proto.naming.fingerprint import tokenizer_fingerprint
from blockyard.worker.config import EngineConfig
from blockyard.worker.memory.kv_size import bytes_per_block, stored_dtype
from blockyard.worker.model.config import ModelConfig, load_config, resolve_model

if TYPE_CHECKING:
    import torch
    from blockyard.worker.execution.runner import TorchRunner
    from blockyard.worker.speculation.draft_model import DraftModel

MOST_TOKENS = 1024
"""Most tokens in a step of the draft model. Its memory was not measured, and a smaller model needs less for them than
the target for its largest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The draft model of an engine, before it is loaded."""

    path: Path
    model: ModelConfig
    block_bytes: int
    """Bytes of a block in its pool."""
    num_spare: int
    """Blocks that its pool has besides one for each block of the target's."""

    @property
    def spare_bytes(self) -> int:
        return self.block_bytes * self.num_spare


def read_draft(config: EngineConfig, target: ModelConfig, tokenizer_path: Path, dtype: str) -> Draft | None:
    """Return the draft model of the settings, or None. `dtype` is what the target computes in.

    Raises ValueError for a draft model that cannot be run, or whose tokens are not the target's.
    """
    if config.draft_model is None:
        return None
    path = resolve_model(config.draft_model)
    model = load_config(path)
    if target.pooling is not None or model.pooling is not None:
        raise ValueError("an embedding model drafts nothing and has no drafts: leave draft_model out")
    if not _have_same_tokens(path, model, tokenizer_path, target):
        raise ValueError(
            f"the draft model {config.draft_model!r} has another tokenizer than the model: their tokens mean different "
            "text"
        )
    block_bytes = bytes_per_block(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        kv_dtype=stored_dtype(config.kv_cache_dtype, dtype),
    )
    return Draft(path=path, model=model, block_bytes=block_bytes, num_spare=config.max_num_seqs)


def _have_same_tokens(path: Path, model: ModelConfig, tokenizer_path: Path, target: ModelConfig) -> bool:
    """Return whether two models have the same tokenizer. Without one, their vocabularies must have the same size."""
    files = (folder / "tokenizer.json" for folder in (path, tokenizer_path))
    if all(file.is_file() for file in files):
        return tokenizer_fingerprint(path) == tokenizer_fingerprint(tokenizer_path)
    return model.vocab_size == target.vocab_size


def load_draft_runner(draft: Draft, config: EngineConfig, device: torch.device, dtype: str) -> TorchRunner:
    """Load the draft model with a pool of one block. Its memory counts when that of the target is measured."""
    from blockyard.worker.execution.runner import TorchRunner

    return TorchRunner.create(
        draft.path,
        device=device,
        dtype=dtype,  # type: ignore[arg-type]
        load_format=config.load_format,
        num_blocks=1,
        block_size=config.block_size,
        deterministic=config.deterministic,
        linears=config.cpu_linears,
        kv_cache_dtype=config.kv_cache_dtype,
        seed=config.seed,
    )


def make_draft_model(
    draft: Draft, config: EngineConfig, runner: TorchRunner, target: ModelConfig, num_blocks: int
) -> DraftModel:
    """Give a draft model's runner its pool, for a target with `num_blocks`, and warm it up."""
    from blockyard.worker.speculation.draft_model import DraftModel

    runner.allocate_pools(num_blocks + draft.num_spare, 0)
    runner.warm_up()
    return DraftModel(
        runner,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_spare=draft.num_spare,
        vocab_size=min(draft.model.vocab_size, target.vocab_size),
        most_positions=draft.model.max_position_embeddings,
        most_tokens=min(config.max_num_batched_tokens, MOST_TOKENS),
    )
