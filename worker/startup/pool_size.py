"""Pool size: how many blocks a worker's pool has, from its settings or from a measured step on its GPU."""

import logging
from collections.abc import Callable

import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.execution.part_runner import PartRunner
from blockyard.worker.execution.step_graphs import GRAPH_BYTES, ladder, shared_sizes
from blockyard.worker.memory.gpu_memory import Meter, measure
from blockyard.worker.memory.host_blocks import STAGING_BYTES
from blockyard.worker.memory.kv_size import KVSize, bytes_per_block, kv_size_in, stored_dtype
from blockyard.worker.model.config import ModelConfig

logger = logging.getLogger(__name__)
CPU_KV_CACHE_BYTES = 2**30


def known_budget(config: EngineConfig, device: torch.device) -> int | None:
    """Return the bytes for the KV cache, or None where they have to be measured."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    return CPU_KV_CACHE_BYTES if device.type == "cpu" else None


def measured_budget(
    part: PartRunner, config: EngineConfig, meter: Meter, largest_step: Callable[[], object]
) -> int:
    """Run the largest step twice, and return the bytes that it and the graphs leave for this rank's KV cache.

    Raises ValueError where they leave none.
    """
    num_tokens, num_sequences = config.max_num_batched_tokens, config.max_num_seqs
    use = measure(meter, largest_step)
    later = STAGING_BYTES + part.split_bounds.partial_bytes(num_sequences, part.config.head_dim)
    if not config.enforce_eager:
        # All graphs share one memory for their tensors. The largest one decides its size.
        rows = ladder(num_sequences)
        num_graphs = (len(rows) + len(shared_sizes(rows))) * (2 if config.max_loras else 1)
        num_graphs += 0 if config.draft_model is None else len(rows) + len(shared_sizes(rows))
        later += GRAPH_BYTES * num_graphs + use.step * num_sequences // num_tokens
    logger.info("memory: %s", use.describe(later))
    return use.for_pool(config.gpu_memory_utilization, later=later)


def size_pool(
    config: EngineConfig, model: ModelConfig, dtype: str, budget: int, *, draft_block_bytes: int = 0
) -> KVSize:
    """Return the size of the served model's pool. A draft model's pool takes `draft_block_bytes` of the budget for each
    of its blocks, and for a spare one of each sequence."""
    block_bytes = bytes_per_block(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        kv_dtype=stored_dtype(config.kv_cache_dtype, dtype),
    )
    kv_size = kv_size_in(
        budget,
        block_size=config.block_size,
        block_bytes=block_bytes,
        draft_block_bytes=draft_block_bytes,
        max_num_seqs=config.max_num_seqs,
    )
    if not kv_size.num_blocks:
        beside = f" beside {kv_size.draft_bytes} bytes for the draft model" if draft_block_bytes else ""
        raise ValueError(
            f"{budget} bytes of KV cache hold no block of {block_bytes + draft_block_bytes} bytes{beside}"
        )
    return kv_size


def check_one_full_sequence_fits(kv_size: KVSize, max_model_len: int) -> None:
    """Raise ValueError where one full sequence does not fit. Loading the weights may take minutes, so this comes
    first."""
    if kv_size.num_tokens < max_model_len:
        raise ValueError(
            f"the KV cache holds {kv_size.num_tokens} tokens, fewer than max_model_len {max_model_len}: give it "
            "more memory (--kv-cache-memory, --gpu-memory-utilization) or lower --max-model-len"
        )
