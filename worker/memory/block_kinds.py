"""Block kinds: the one place where a worker says what its KV blocks are, for whatever takes blocks from elsewhere.

Pulls and moved sequences compare these kinds. Host memory keeps blocks of its own process alone, which are of one kind.
"""

from collections.abc import Sequence
from functools import cache
from itertools import groupby

import torch
from blockyard.kernels.interface import Backend
from blockyard.proto.naming.block_kind import BlockKind
from blockyard.proto.naming.code_version import sources_hash

COMPUTING_CODE = ("kernels", "worker/execution", "worker/lora", "worker/model")
"""Folders of the sources that decide values. The C++ kernels count by their library too."""


def block_kind(
    backend: Backend,
    kv_pools: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> BlockKind:
    """Return the kind of the blocks in a model's pools, one for each layer [B, 2, K, P, D].

    It holds all that changes a block: its order and shape in each layer, ranks, data types, kernels, vector units,
    libraries and code. What the weights say is in the model's fingerprint.
    """
    layers = [f"{backend.kv_layout(pool, dtype)}:{_name(pool.dtype)}:{_shape(pool)}" for pool in kv_pools]
    groups = [f"{len(list(same))}x{layer}" for layer, same in groupby(layers)]
    ranks = f"rank={rank}/{num_ranks}"
    words = backend.arithmetic(kv_pools[0], dtype)
    return BlockKind(
        layout=f"layers={','.join(groups)} {ranks}",
        arithmetic=" ".join(
            (f"dtype={_name(dtype)}", *words, f"ranks={num_ranks}", f"code={computing_code()}")
        ),
    )


@cache
def computing_code() -> str:
    """Return a hash of the code that decides values."""
    return sources_hash(*COMPUTING_CODE)


def _shape(pool: torch.Tensor) -> str:
    """Return the shape of one block: keys and values, heads, tokens, numbers of a head with its scale."""
    return "x".join(map(str, pool.shape[1:]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
