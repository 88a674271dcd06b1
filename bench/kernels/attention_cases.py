"""Attention cases: decodes, prompts, chunks of prompts, and decodes with a chunk.

Some have a window, a pool in 8 bits, or decodes with a shared prefix. Bytes and FLOPs are counted as in cases.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from blockyard.kernels.attention.plan import AttentionPlan, plan_attention
from blockyard.kernels.kv_pool import QUANTISED_DTYPES, QuantisedName, movable, pool_shape, scales_of
from blockyard.worker.memory.kv_size import bytes_per_block

from bench.engine.shapes import Shape
from bench.kernels.case import BLOCK_SIZE, Bench, Case

CASCADE, ONE_BY_ONE = "decode attention, cascade", "decode attention, no cascade"


def attention(
    bench: Bench,
    model: str,
    shape: Shape,
    name: str,
    queries: Sequence[int],
    context: int,
    *,
    stored: QuantisedName | None = None,
    window: int | None = None,
) -> Case:
    """Make a case in which row i has `queries[i]` queries at the end of `context` tokens.

    `stored` chooses a pool in 8 bits. With a window, keys that no query of their row sees need not be read.
    """
    item = bench.dtype.itemsize
    tokens, reach = sum(queries), min(window or context, context)
    keys = sum(min(context, count + reach - 1) for count in queries)
    kv_bytes = keys * bytes_per_block(
        num_layers=1,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=1,
        kv_dtype=stored or str(bench.dtype).removeprefix("torch."),
    )
    seen = sum(min(place + 1, reach) for count in queries for place in range(context - count, context))

    def make() -> Callable[[], object]:
        pool, plan = pool_and_plan(bench, shape, queries, context, stored)
        if window is not None:
            plan = plan.windowed(window)
        q_TND = bench.random(tokens, shape.heads, shape.head_dim)
        out_TND = torch.empty_like(q_TND)
        scale = shape.head_dim**-0.5
        return lambda: bench.backend.attention(q_TND, pool, plan, scale=scale, out_TND=out_TND)

    return Case(
        kernel=f"{kind_of(queries)}{'' if window is None else ', window'}{in_pool(stored)}",
        model=model,
        shape=name,
        num_bytes=kv_bytes + 2 * tokens * shape.heads * shape.head_dim * item,
        flops=4 * seen * shape.heads * shape.head_dim,
        resident_bytes=2 * kv_bytes * context * len(queries) // keys,
        make=make,
    )


def kind_of(queries: Sequence[int]) -> str:
    if max(queries) == 1:
        return "decode attention"
    return "prefill attention" if min(queries) > 1 else "mixed attention"


def in_pool(stored: QuantisedName | None) -> str:
    return "" if stored is None else f", KV in {stored}"


def shared_attention(
    bench: Bench, model: str, shape: Shape, sequences: int, shared: int, own: int, *, is_cascade: bool
) -> Case:
    """Make a case of decodes with a shared prefix, which is read once for all (cascade) or once for each."""
    name = f"decode {sequences} x ({shared} shared + {own})"
    values = shape.kv_heads * shape.head_dim
    kv_bytes = 2 * (shared + sequences * own) * values * bench.dtype.itemsize

    def make() -> Callable[[], object]:
        num_shared, num_own = shared // BLOCK_SIZE, own // BLOCK_SIZE
        num_blocks = num_shared + sequences * num_own
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        firsts = range(num_shared, num_blocks, num_own)
        plan = plan_attention(
            query_lens=[1] * sequences,
            context_lens=[shared + own] * sequences,
            block_tables=[[*order[:num_shared], *order[first : first + num_own]] for first in firsts],
            block_size=BLOCK_SIZE,
            device=bench.device,
            num_kv_heads=shape.kv_heads,
            group=shape.heads // shape.kv_heads,
        )
        if not is_cascade:
            plan = each_by_itself(plan, bench.device)
        pool = bench.random(num_blocks, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
        q_TND = bench.random(sequences, shape.heads, shape.head_dim)
        out_TND = torch.empty_like(q_TND)
        scale = shape.head_dim**-0.5
        return lambda: bench.backend.attention(q_TND, pool, plan, scale=scale, out_TND=out_TND)

    return Case(
        kernel=CASCADE if is_cascade else ONE_BY_ONE,
        model=model,
        shape=name,
        num_bytes=kv_bytes + 2 * sequences * shape.heads * shape.head_dim * bench.dtype.itemsize,
        flops=4 * sequences * (shared + own) * shape.heads * shape.head_dim,
        resident_bytes=2 * 2 * kv_bytes,
        make=make,
        turns=f"{model} {name}",
    )


def each_by_itself(plan: AttentionPlan, device: torch.device) -> AttentionPlan:
    """Return a plan of the same decodes that reads the shared prefix once for each sequence.

    CPU kernels find shared prefixes themselves, except under a window. So on a CPU the plan has a window that hides no
    key.
    """
    alone = plan.of_last_queries()
    return alone if device.type == "cuda" else replace(alone, window=max(plan.context_lens))


def pool_and_plan(
    bench: Bench,
    shape: Shape,
    queries: Sequence[int],
    context: int,
    stored: QuantisedName | None = None,
) -> tuple[torch.Tensor, AttentionPlan]:
    blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(blocks * len(queries), generator=torch.Generator().manual_seed(0)).tolist()
    tables = [order[row * blocks : (row + 1) * blocks] for row in range(len(queries))]
    plan = plan_attention(
        query_lens=queries,
        context_lens=[context] * len(queries),
        block_tables=tables,
        block_size=BLOCK_SIZE,
        device=bench.device,
        num_kv_heads=shape.kv_heads,
        group=shape.heads // shape.kv_heads,
    )
    if stored is None:
        return bench.random(len(order), 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim), plan
    dtype = QUANTISED_DTYPES[stored]
    sizes = pool_shape(len(order), shape.kv_heads, BLOCK_SIZE, shape.head_dim, dtype)
    pool = torch.empty(sizes, device=bench.device, dtype=dtype)
    movable(pool).random_(0, 126)
    scales_of(pool).fill_(0.01)
    return pool, plan
