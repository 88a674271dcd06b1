"""Every kernel over the shapes of well-known models: what is called, and how many bytes and FLOPs that is.

Bytes are those that must move at least once, FLOPs those that the result needs: causal attention counts half of its
square. Blocks lie in the pool in random order, as they do after an hour of serving. Owns no timing.

Shapes: T tokens, N query heads, K kv heads, D head size, P tokens a block, B blocks in the pool, H hidden size,
I intermediate size, R sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from blockyard.kernels.attention_plan import AttentionPlan, plan_attention
from blockyard.kernels.backend import Backend, HeadNorms
from blockyard.kernels.kv_pool import QUANTISED_DTYPES, QuantisedName, movable, pool_shape, scales_of
from blockyard.worker.kv_size import bytes_per_block

from bench.engine.shapes import SHAPES, Shape

BLOCK_SIZE = 16
MOST_SEQUENCES = 256
"""That sample in one step, or whose blocks are copied."""
CASCADE, ONE_BY_ONE = "decode attention, cascade", "decode attention, no cascade"
MODELS = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "qwen3-14b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one shape. `make` allocates, and gives what is to be timed."""

    kernel: str
    model: str
    shape: str
    num_bytes: int
    flops: int
    resident_bytes: int
    """What it takes in memory."""
    make: Callable[[], Callable[[], object]]
    turns: str = ""
    """Cases that follow one another with the same name here are measured in turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How far the cases go."""

    sequences: Sequence[int]
    contexts: Sequence[int]
    prefills: Sequence[int]
    models: Sequence[str]
    shared: Sequence[tuple[int, int, int]]
    """Decodes, the tokens that all of them share, and those that each has of its own."""


FULL = Sizes(
    sequences=(1, 8, 16, 32, 64, 128, 256),
    contexts=(128, 1024, 8192, 32768),
    prefills=(128, 512, 2048, 8192, 32768),
    models=MODELS,
    shared=((8, 512, 256), (32, 2048, 256), (64, 8192, 256)),
)
CPU = Sizes(
    sequences=(1, 8, 32),
    contexts=(128, 512, 2048),
    prefills=(128, 512),
    models=("llama-166m", "qwen3-0.6b"),
    shared=((8, 512, 32), (32, 512, 32), (32, 8192, 256)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where cases run."""

    backend: Backend
    device: torch.device
    dtype: torch.dtype

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def cases(bench: Bench, sizes: Sizes) -> Iterator[Case]:
    for model in sizes.models:
        shape = SHAPES[model]
        for context in sizes.contexts:
            for sequences in sizes.sequences:
                yield _attention(
                    bench, model, shape, f"decode {sequences} x {context}", [1] * sequences, context
                )
                for stored in QUANTISED_DTYPES if context in sizes.contexts[-2:] else ():
                    name = f"decode {sequences} x {context}"
                    yield _attention(bench, model, shape, name, [1] * sequences, context, stored)
        for sharers in sizes.shared:
            for is_cascade in (True, False):
                yield _shared_attention(bench, model, shape, *sharers, is_cascade=is_cascade)
        for prompt in sizes.prefills:
            yield _attention(bench, model, shape, f"prefill {prompt}", [prompt], prompt)
        for tokens in sorted({*sizes.sequences, *(size for size in sizes.prefills if size <= 8192)}):
            yield from _of_a_layer(bench, model, shape, tokens)
            yield from _around_layers(bench, model, shape, tokens)


def _attention(
    bench: Bench,
    model: str,
    shape: Shape,
    name: str,
    queries: Sequence[int],
    context: int,
    stored: QuantisedName | None = None,
) -> Case:
    """Over a pool in the data type, or in 8 bits."""
    item = bench.dtype.itemsize
    keys = context * len(queries)
    tokens = sum(queries)
    kv_bytes = keys * bytes_per_block(
        num_layers=1,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=1,
        kv_dtype=stored or str(bench.dtype).removeprefix("torch."),
    )
    kind = "decode attention" if tokens == len(queries) else "prefill attention"
    seen = sum(count * (context - count) + count * (count + 1) // 2 for count in queries)

    def make() -> Callable[[], object]:
        pool, plan = _pool_and_plan(bench, shape, queries, context, stored)
        q_TND = bench.random(tokens, shape.heads, shape.head_dim)
        out_TND = torch.empty_like(q_TND)
        scale = shape.head_dim**-0.5
        return lambda: bench.backend.attention(q_TND, pool, plan, scale=scale, out_TND=out_TND)

    return Case(
        kernel=kind if stored is None else f"{kind}, KV in {stored}",
        model=model,
        shape=name,
        num_bytes=kv_bytes + 2 * tokens * shape.heads * shape.head_dim * item,
        flops=4 * seen * shape.heads * shape.head_dim,
        resident_bytes=2 * kv_bytes,
        make=make,
    )


def _shared_attention(
    bench: Bench, model: str, shape: Shape, sequences: int, shared: int, own: int, *, is_cascade: bool
) -> Case:
    """Decodes of which each reads the same blocks first, together (cascade) or each by itself."""
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
    """The plan of the same decodes without work items over what they share; on a CPU, whose kernels look for that
    themselves, under a window that hides nothing: there they do not."""
    alone = plan.of_last_queries()
    return alone if device.type == "cuda" else replace(alone, window=max(plan.context_lens))


def _pool_and_plan(
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
    )
    if stored is None:
        return bench.random(len(order), 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim), plan
    dtype = QUANTISED_DTYPES[stored]
    sizes = pool_shape(len(order), shape.kv_heads, BLOCK_SIZE, shape.head_dim, dtype)
    pool = torch.empty(sizes, device=bench.device, dtype=dtype)
    movable(pool).random_(0, 126)
    scales_of(pool).fill_(0.01)
    return pool, plan


def _of_a_layer(bench: Bench, model: str, shape: Shape, tokens: int) -> Iterator[Case]:
    """What a layer does beside attention, at one number of tokens."""
    item = bench.dtype.itemsize
    backend, hidden, heads, kv = bench.backend, shape.hidden, shape.heads, shape.kv_heads
    row = tokens * hidden * item
    head_bytes = shape.head_dim * item

    case = partial(_case, model, tokens)

    def add_norm() -> Callable[[], object]:
        x, residual, weight = bench.random(tokens, hidden), bench.random(tokens, hidden), bench.random(hidden)
        out = torch.empty_like(x)
        return lambda: backend.add_rms_norm(x, residual, weight, 1e-6, out_TH=out)

    def norm() -> Callable[[], object]:
        x, weight = bench.random(tokens, hidden), bench.random(hidden)
        out = torch.empty_like(x)
        return lambda: backend.rms_norm(x, weight, 1e-6, out_TH=out)

    def silu() -> Callable[[], object]:
        gate_up, out = bench.random(tokens, 2 * shape.intermediate), bench.empty(tokens, shape.intermediate)
        return lambda: backend.silu_mul(gate_up, out_TI=out)

    def rotary() -> Callable[[], object]:
        q, k = bench.random(tokens, heads, shape.head_dim), bench.random(tokens, kv, shape.head_dim)
        table = torch.randn(tokens, shape.head_dim, device=bench.device)
        positions = torch.arange(tokens, device=bench.device)
        return lambda: backend.rotary(q, k, table, positions)

    def write() -> Callable[[], object]:
        pool, plan = _pool_and_plan(bench, shape, [tokens], tokens)
        k, v = bench.random(tokens, kv, shape.head_dim), bench.random(tokens, kv, shape.head_dim)
        return lambda: backend.write_kv(k, v, pool, plan)

    def place() -> Callable[[], object]:
        pool, plan = _pool_and_plan(bench, shape, [tokens], tokens)
        every = bench.random(tokens, heads + 2 * kv, shape.head_dim)
        table = torch.randn(tokens, shape.head_dim, device=bench.device)
        weight = bench.random(shape.head_dim)
        norms = HeadNorms(q_weight_D=weight, k_weight_D=weight, eps=1e-6)
        return lambda: backend.place_heads(every, norms, table, pool, plan)

    yield case("rms_norm", 2 * row, 4 * tokens * hidden, norm)
    yield case("add_rms_norm", 4 * row, 5 * tokens * hidden, add_norm)
    yield case("silu_mul", 3 * tokens * shape.intermediate * item, 5 * tokens * shape.intermediate, silu)
    yield case(
        "rotary", 2 * tokens * (heads + kv) * head_bytes, 3 * tokens * (heads + kv) * shape.head_dim, rotary
    )
    yield case("write_kv", 4 * tokens * kv * head_bytes, 0, write)
    yield case(
        "place_heads",
        (2 * heads + 4 * kv) * tokens * head_bytes,
        7 * tokens * (heads + kv) * shape.head_dim,
        place,
    )
    for name, outputs, inputs in _linears(shape):
        yield _linear(bench, model, tokens, name, outputs, inputs)


def _around_layers(bench: Bench, model: str, shape: Shape, tokens: int) -> Iterator[Case]:
    """What a step does once, and what moves blocks, at one number of tokens."""
    item = bench.dtype.itemsize
    backend, hidden, kv = bench.backend, shape.hidden, shape.kv_heads
    row = tokens * hidden * item
    case = partial(_case, model, tokens)

    def embed() -> Callable[[], object]:
        table = bench.random(shape.vocab, hidden)
        ids = torch.randint(shape.vocab, (tokens,), device=bench.device)
        return lambda: backend.embed(table, ids)

    def likeliest() -> Callable[[], object]:
        logits = bench.random(tokens, shape.vocab)
        return lambda: backend.likeliest(logits)

    def copy() -> Callable[[], object]:
        pool = bench.random(2 * tokens, 2, kv, BLOCK_SIZE, shape.head_dim)
        pairs = torch.arange(2 * tokens, device=bench.device).view(2, tokens).T.contiguous()
        return lambda: backend.copy_blocks(pool, pairs)

    yield replace(case("embed", 2 * row, 0, embed), resident_bytes=shape.vocab * hidden * item + row)
    if tokens <= MOST_SEQUENCES:
        copied_bytes = 4 * tokens * kv * BLOCK_SIZE * shape.head_dim * item
        yield case("copy_blocks (one a token)", copied_bytes, 0, copy)
        yield _linear(bench, model, tokens, "linear head", shape.vocab, hidden)
        yield case("likeliest token", tokens * shape.vocab * item, 0, likeliest)


def _case(
    model: str,
    tokens: int,
    kernel: str,
    num_bytes: int,
    flops: int,
    make: Callable[[], Callable[[], object]],
) -> Case:
    return Case(
        kernel=kernel,
        model=model,
        shape=f"{tokens} tokens",
        num_bytes=num_bytes,
        flops=flops,
        resident_bytes=2 * num_bytes,
        make=make,
    )


def _linears(shape: Shape) -> Iterator[tuple[str, int, int]]:
    attention = shape.heads * shape.head_dim
    yield "linear qkv", attention + 2 * shape.kv_heads * shape.head_dim, shape.hidden
    yield "linear out", shape.hidden, attention
    yield "linear gate-up", 2 * shape.intermediate, shape.hidden
    yield "linear down", shape.hidden, shape.intermediate


def _linear(bench: Bench, model: str, tokens: int, name: str, outputs: int, inputs: int) -> Case:
    item = bench.dtype.itemsize

    def make() -> Callable[[], object]:
        weight = bench.backend.pack_linear(bench.random(outputs, inputs))
        x = bench.random(tokens, inputs)
        return lambda: bench.backend.linear(x, weight)

    num_bytes = (outputs * inputs + tokens * (inputs + outputs)) * item
    return Case(
        kernel=name,
        model=model,
        shape=f"{tokens} tokens",
        num_bytes=num_bytes,
        flops=2 * tokens * outputs * inputs,
        resident_bytes=2 * num_bytes,
        make=make,
    )
