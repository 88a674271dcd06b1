"""Size of a model's KV cache in a memory budget, and memory of a worker that has this cache, for `blockyard size`.

The sizes themselves are in kv_size.py.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from blockyard.worker.memory.kv_size import (
    DTYPE_BYTES,
    KVCacheDtype,
    KVSize,
    bytes_per_block,
    kv_size_in,
    stored_dtype,
)
from blockyard.worker.model.config import HUB_CONFIG_PATTERNS, ModelConfig, load_config, resolve_model
from blockyard.worker.model.data_type import (
    ChosenDataType,
    RequestedDataType,
    choose_dtype,
    cpu_has_bfloat16,
)
from blockyard.worker.model.division import divide
from blockyard.worker.model.shards import num_parameters, weights_bytes

CPU_PROCESS_BYTES = 360 * 2**20
"""Memory that a worker on a CPU takes beside its weights and its KV cache: Python, PyTorch, Ray and work space.

Measured on 2026-11-26 on two cores with avx512_bf16, Python 3.11, PyTorch 2.13.0+cpu and Ray 2.60.0. It is the resident
set (VmRSS) of the demo model's only worker after three requests of 100 tokens, less weights and pool. It was 346 MiB in
bfloat16 with a pool of 18 MiB, and 358 MiB in float32 with one of 1 GiB. Of these 139 MiB are pages of files, which
workers of a machine share. A larger model takes more, because its steps need more work space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Memory of one worker, or of each of its ranks. The KV cache fills a given budget."""

    model: str
    dtype: ChosenDataType
    kv_dtype: str
    max_model_len: int
    tensor_parallel_size: int
    """Ranks of the worker. Sizes are those of one rank."""
    weights_bytes: int
    """Size of the weights, in `dtype` where they are not quantised. They are held beside the KV cache."""
    process_bytes: int | None
    """Memory of the process beside weights and KV cache. None on a GPU, where the worker measures it at its start."""
    draft_weights_bytes: int
    """Size of the draft model's weights, 0 without one. Its own pool is a part of the budget."""
    slots_bytes: int
    """Memory of all adapter slots."""
    kv: KVSize
    memory_bytes: int | None
    """Memory of the machine or the GPU. None if unknown."""

    @property
    def total_bytes(self) -> int:
        pools_bytes = self.kv.total_bytes + self.kv.draft_bytes
        weights_bytes = self.weights_bytes + self.draft_weights_bytes
        return weights_bytes + (self.process_bytes or 0) + self.slots_bytes + pools_bytes

    @property
    def shared_bytes(self) -> int:
        """Memory of the machine or the GPU that one worker takes. Its ranks share a machine, and have a GPU each."""
        return self.total_bytes * (1 if self.process_bytes is None else self.tensor_parallel_size)

    @property
    def left_bytes(self) -> int | None:
        """Memory of the machine or the GPU that one worker leaves. Negative if the worker does not fit."""
        return None if self.memory_bytes is None else self.memory_bytes - self.shared_bytes

    def as_dict(self) -> dict[str, object]:
        return {
            "model": self.model,
            "dtype": self.dtype.name,
            "dtype_why": self.dtype.why,
            "kv_dtype": self.kv_dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "weights_bytes": self.weights_bytes,
            "draft_weights_bytes": self.draft_weights_bytes,
            "process_bytes": self.process_bytes,
            "slots_bytes": self.slots_bytes,
            "kv_bytes": self.kv.total_bytes,
            "draft_kv_bytes": self.kv.draft_bytes,
            "total_bytes": self.total_bytes,
            "memory_bytes": self.memory_bytes,
            "left_bytes": self.left_bytes,
            "block_size": self.kv.block_size,
            "bytes_per_block": self.kv.block_bytes,
            "blocks": self.kv.num_blocks,
            "tokens": self.kv.num_tokens,
            "max_model_len": self.max_model_len,
            "max_concurrency": round(self.kv.max_concurrency(self.max_model_len), 2),
        }


def machine_memory_bytes() -> int:
    """Return the bytes of physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def adapter_slots_bytes(config: ModelConfig, max_loras: int, max_lora_rank: int, item_bytes: int) -> int:
    """Compute the bytes of a worker's adapter slots. Raise ValueError for a model that serves no adapters."""
    if not max_loras:
        return 0
    # They import PyTorch, which most commands should not wait for.
    from blockyard.worker.lora.layout import slot_bytes
    from blockyard.worker.lora.peft import check_has_slots

    check_has_slots(config)
    return max_loras * slot_bytes(config, max_lora_rank, item_bytes)


def plain_or_quantised_bytes(part: ModelConfig, item_bytes: int, *, on_cpu: bool, deterministic: bool) -> int:
    """Compute the bytes of one rank's weights, without the copies that kernels make of some.

    Deterministic mode computes with plain numbers, so it holds quantised weights as such.
    """
    if deterministic:
        return num_parameters(part) * item_bytes
    return weights_bytes(part, item_bytes, on_cpu=on_cpu)


def draft_bytes_per_block(draft: ModelConfig, *, block_size: int, dtype: str) -> int:
    """Compute the bytes of a block of a draft model's pool, which is not quantised."""
    return bytes_per_block(
        num_layers=draft.num_layers,
        num_kv_heads=draft.num_kv_heads,
        head_dim=draft.head_dim,
        block_size=block_size,
        kv_dtype=dtype,
    )


def size_model(
    model: str,
    *,
    budget_bytes: int,
    block_size: int,
    dtype: RequestedDataType,
    kv_cache_dtype: KVCacheDtype,
    on_cpu: bool,
    max_model_len: int | None,
    memory_bytes: int | None = None,
    tensor_parallel_size: int = 1,
    deterministic: bool = False,
    max_loras: int = 0,
    max_lora_rank: int = 16,
    draft_model: str | None = None,
    max_num_seqs: int = 256,
) -> ModelSize:
    """Return the memory of a worker with this model, and the size of its KV cache in `budget_bytes`.

    Of several ranks, return that of each. `on_cpu`: a CPU like this machine's, since dtype "auto" depends on its
    instructions. Raise ValueError for a model that the engine cannot run or split, or a context longer than the
    model's. Slots need a model that serves adapters, and deterministic mode float32. The budget also holds the pool of
    a draft model, which one rank alone may have.
    """
    config = load_config(resolve_model(model, patterns=HUB_CONFIG_PATTERNS))
    chosen = choose_dtype(
        dtype, config.dtype, on_cpu=on_cpu, has_bfloat16=cpu_has_bfloat16(), deterministic=deterministic
    )
    context = max_model_len or config.max_position_embeddings
    if context > config.max_position_embeddings:
        raise ValueError(f"max_model_len {context} is beyond the model's {config.max_position_embeddings}")
    part = divide(config, size=tensor_parallel_size).config
    kv_dtype = stored_dtype(kv_cache_dtype, chosen.name)
    block_bytes = bytes_per_block(
        num_layers=config.num_layers,
        num_kv_heads=part.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        kv_dtype=kv_dtype,
    )
    if draft_model is not None and tensor_parallel_size > 1:
        raise ValueError("a draft model needs a worker of one rank (--tensor-parallel-size 1)")
    draft_weights_bytes, draft_block_bytes = _draft_sizes(
        draft_model, dtype, block_size=block_size, on_cpu=on_cpu, deterministic=deterministic
    )
    kv = kv_size_in(
        budget_bytes,
        block_size=block_size,
        block_bytes=block_bytes,
        draft_block_bytes=draft_block_bytes,
        max_num_seqs=max_num_seqs,
    )
    return ModelSize(
        model=model,
        dtype=chosen,
        kv_dtype=kv_dtype,
        max_model_len=context,
        tensor_parallel_size=tensor_parallel_size,
        weights_bytes=plain_or_quantised_bytes(
            part, DTYPE_BYTES[chosen.name], on_cpu=on_cpu, deterministic=deterministic
        ),
        draft_weights_bytes=draft_weights_bytes,
        process_bytes=CPU_PROCESS_BYTES if on_cpu else None,
        slots_bytes=adapter_slots_bytes(config, max_loras, max_lora_rank, DTYPE_BYTES[chosen.name]),
        kv=kv,
        memory_bytes=machine_memory_bytes() if on_cpu and memory_bytes is None else memory_bytes,
    )


def _draft_sizes(
    model: str | None, dtype: RequestedDataType, *, block_size: int, on_cpu: bool, deterministic: bool
) -> tuple[int, int]:
    """Return the bytes of a draft model's weights and of a block of its pool, 0 without one."""
    if model is None:
        return 0, 0
    draft = load_config(resolve_model(model, patterns=HUB_CONFIG_PATTERNS))
    chosen = choose_dtype(
        dtype, draft.dtype, on_cpu=on_cpu, has_bfloat16=cpu_has_bfloat16(), deterministic=deterministic
    ).name
    held_bytes = plain_or_quantised_bytes(
        draft, DTYPE_BYTES[chosen], on_cpu=on_cpu, deterministic=deterministic
    )
    return held_bytes, draft_bytes_per_block(draft, block_size=block_size, dtype=chosen)


def left_bytes_of(sizes: Sequence[ModelSize]) -> int | None:
    """Return the machine's memory that a worker of each model leaves. None on GPUs: each worker has its own."""
    first = sizes[0]
    if first.process_bytes is None or first.memory_bytes is None:
        return None
    return first.memory_bytes - sum(one.shared_bytes for one in sizes)


def sizes_document(sizes: Sequence[ModelSize]) -> dict[str, object]:
    """Return the document of one model, or of several with what they take and leave together."""
    if len(sizes) == 1:
        return sizes[0].as_dict()
    return {
        "models": [one.as_dict() for one in sizes],
        "total_bytes": sum(one.shared_bytes for one in sizes),
        "left_bytes": left_bytes_of(sizes),
    }
