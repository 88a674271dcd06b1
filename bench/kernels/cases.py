"""Cases of every kernel over the shapes of well-known models: the call, its bytes and its FLOPs.

Bytes are those that must move at least once. FLOPs are those that the result needs: causal attention counts half of its
square. Blocks lie in the pool in random order, as after an hour of serving. Owns no timing.

Shapes: T tokens, N query heads, K kv heads, D head size, P tokens a block, B blocks in the pool, H hidden size,
I intermediate size, R sequences.

The roofline does not include the bus to host memory. For a draw, it counts only reading the logits, without further
work and random numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from blockyard.kernels.interface import HeadNorms
from blockyard.kernels.kv_pool import QUANTISED_DTYPES, QuantisedName
from blockyard.kernels.torch.nucleus import NucleusSearch
from blockyard.worker.memory.host_blocks import HostBlocks
from blockyard.worker.memory.kv_size import bytes_per_block
from blockyard.worker.sampling.sampler import Sampler
from blockyard.worker.sequences.identifiers import BlockId, HostSlot, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence as RunningSequence
from blockyard.worker.sequences.sequence import token_array
from blockyard.worker.sequences.step_plan import ScheduledRow

from bench.engine.shapes import SHAPES, Shape
from bench.kernels.attention_cases import attention, in_pool, pool_and_plan, shared_attention
from bench.kernels.case import BLOCK_SIZE, Bench, Case, case_of_tokens
from bench.kernels.expert_cases import HALF_AS_WIDE, MIXTRAL_8X7B, QWEN3_30B_A3B, ExpertShape, experts
from bench.kernels.linear_cases import linears

MOST_SEQUENCES = 256
"""Maximum number of sequences that sample in one step, or whose blocks are copied."""
MOST_TOKENS = 8192
"""Maximum tokens of a step in cases other than attention."""
PEAKED_SPREAD = 6.0
"""Standard deviation of logits of which few are likely."""
MODELS = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "qwen3-14b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the cases."""

    sequences: Sequence[int]
    contexts: Sequence[int]
    prefills: Sequence[int]
    models: Sequence[str]
    shared: Sequence[tuple[int, int, int]]
    """Number of decodes, tokens that all of them share, and own tokens of each."""
    chunks: Sequence[tuple[int, int]]
    """Tokens of a prompt's last chunk, and its context."""
    mixed: tuple[int, int, int]
    """Number of decodes, tokens of a chunk beside them, and the context of all."""
    window: tuple[int, int, int]
    """Number of decodes, their context, and their window."""
    swaps: Sequence[int]
    """Numbers of blocks, over all layers, that move to host memory or back."""
    mixtures: Sequence[ExpertShape] = ()


FULL = Sizes(
    sequences=(1, 8, 16, 32, 64, 128, 256),
    contexts=(128, 1024, 8192, 32768),
    prefills=(128, 512, 2048, 8192, 32768),
    models=MODELS,
    shared=((8, 512, 256), (32, 2048, 256), (64, 8192, 256)),
    chunks=((512, 8192), (512, 32768)),
    mixed=(32, 512, 8192),
    window=(16, 32768, 4096),
    swaps=(8, 64),
    mixtures=(QWEN3_30B_A3B, MIXTRAL_8X7B),
)
CPU = Sizes(
    sequences=(1, 8, 32),
    contexts=(128, 512, 2048),
    prefills=(128, 512),
    models=("llama-166m", "qwen3-0.6b"),
    shared=((8, 512, 32), (32, 512, 32), (32, 8192, 256)),
    chunks=((128, 2048),),
    mixed=(8, 128, 1024),
    window=(8, 2048, 512),
    swaps=(8,),
    mixtures=(HALF_AS_WIDE,),
)


def cases(bench: Bench, sizes: Sizes) -> Iterator[Case]:
    for model in sizes.models:
        shape = SHAPES[model]
        yield from _attentions(bench, model, shape, sizes)
        prompts = [size for size in sizes.prefills if size <= MOST_TOKENS]
        for tokens in sorted({*sizes.sequences, *prompts}):
            yield from _of_a_layer(bench, model, shape, tokens)
            yield from _writes(bench, model, shape, tokens)
            for stored in QUANTISED_DTYPES if tokens in (sizes.sequences[-1], prompts[-1]) else ():
                yield from _writes(bench, model, shape, tokens, stored)
            yield from _around_layers(bench, model, shape, tokens)
        for count in sizes.swaps:
            yield from _swaps(bench, model, shape, count)
    for mixture in sizes.mixtures:
        for tokens in sorted({*sizes.sequences, *(size for size in sizes.prefills if size <= MOST_TOKENS)}):
            yield from experts(bench, mixture, tokens)


def _attentions(bench: Bench, model: str, shape: Shape, sizes: Sizes) -> Iterator[Case]:
    """Yield the attention cases. Only long contexts and prompts also have pools in 8 bits."""
    attend = partial(attention, bench, model, shape)
    for context in sizes.contexts:
        for sequences in sizes.sequences:
            name, queries = f"decode {sequences} x {context}", [1] * sequences
            yield attend(name, queries, context)
            for stored in QUANTISED_DTYPES if context in sizes.contexts[-2:] else ():
                yield attend(name, queries, context, stored=stored)
    for sharers in sizes.shared:
        for is_cascade in (True, False):
            yield shared_attention(bench, model, shape, *sharers, is_cascade=is_cascade)
    for prompt in sizes.prefills:
        yield attend(f"prefill {prompt}", [prompt], prompt)
        for stored in QUANTISED_DTYPES if prompt in sizes.prefills[-2:] else ():
            yield attend(f"prefill {prompt}", [prompt], prompt, stored=stored)
    for chunk, context in sizes.chunks:
        yield attend(f"last {chunk} of {context}", [chunk], context)
    decodes, chunk, context = sizes.mixed
    yield attend(f"decode {decodes} and last {chunk}, of {context}", [*[1] * decodes, chunk], context)
    decodes, context, window = sizes.window
    yield attend(f"decode {decodes} x {context}, {window} seen", [1] * decodes, context, window=window)


def _of_a_layer(bench: Bench, model: str, shape: Shape, tokens: int) -> Iterator[Case]:
    """Yield a layer's operations other than attention, for one number of tokens."""
    item = bench.dtype.itemsize
    backend, hidden, heads, kv = bench.backend, shape.hidden, shape.heads, shape.kv_heads
    row = tokens * hidden * item
    head_bytes = shape.head_dim * item

    case = partial(case_of_tokens, model, tokens)

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

    yield case("rms_norm", 2 * row, 4 * tokens * hidden, norm)
    yield case("add_rms_norm", 4 * row, 5 * tokens * hidden, add_norm)
    yield case("silu_mul", 3 * tokens * shape.intermediate * item, 5 * tokens * shape.intermediate, silu)
    yield case(
        "rotary", 2 * tokens * (heads + kv) * head_bytes, 3 * tokens * (heads + kv) * shape.head_dim, rotary
    )
    for name, outputs, inputs in _linears(shape):
        yield from linears(bench, model, tokens, name, outputs, inputs, with_quantised=model == MODELS[0])


def _writes(
    bench: Bench, model: str, shape: Shape, tokens: int, stored: QuantisedName | None = None
) -> Iterator[Case]:
    """Yield the kernels that store keys and values: alone, and fused with RoPE and the model's QK norms, if any."""
    backend, heads, kv = bench.backend, shape.heads, shape.kv_heads
    head_bytes = shape.head_dim * bench.dtype.itemsize
    stored_bytes = tokens * bytes_per_block(
        num_layers=1,
        num_kv_heads=kv,
        head_dim=shape.head_dim,
        block_size=1,
        kv_dtype=stored or str(bench.dtype).removeprefix("torch."),
    )
    case = partial(case_of_tokens, model, tokens)

    def write() -> Callable[[], object]:
        pool, plan = pool_and_plan(bench, shape, [tokens], tokens, stored)
        k, v = bench.random(tokens, kv, shape.head_dim), bench.random(tokens, kv, shape.head_dim)
        return lambda: backend.write_kv(k, v, pool, plan)

    def place() -> Callable[[], object]:
        pool, plan = pool_and_plan(bench, shape, [tokens], tokens, stored)
        every = bench.random(tokens, heads + 2 * kv, shape.head_dim)
        table = torch.randn(tokens, shape.head_dim, device=bench.device)
        weight = bench.random(shape.head_dim)
        norms = HeadNorms(q_weight_D=weight, k_weight_D=weight, eps=1e-6) if shape.has_head_norms else None
        return lambda: backend.qk_norm_rope_write(every, norms, table, pool, plan)

    yield case(f"write_kv{in_pool(stored)}", 2 * tokens * kv * head_bytes + stored_bytes, 0, write)
    yield case(
        f"qk_norm_rope_write{' with QK norms' if shape.has_head_norms else ''}{in_pool(stored)}",
        2 * (heads + kv) * tokens * head_bytes + stored_bytes,
        (7 if shape.has_head_norms else 3) * tokens * (heads + kv) * shape.head_dim,
        place,
    )


def _around_layers(bench: Bench, model: str, shape: Shape, tokens: int) -> Iterator[Case]:
    """Yield the operations that run once per step, and block copies, for one number of tokens."""
    item = bench.dtype.itemsize
    backend, hidden, kv = bench.backend, shape.hidden, shape.kv_heads
    row = tokens * hidden * item
    case = partial(case_of_tokens, model, tokens)

    def embed() -> Callable[[], object]:
        table = bench.random(shape.vocab, hidden)
        ids = torch.randint(shape.vocab, (tokens,), device=bench.device)
        return lambda: backend.embed(table, ids)

    def greedy_tokens() -> Callable[[], object]:
        logits = bench.random(tokens, shape.vocab)
        return lambda: backend.greedy_tokens(logits)

    def copy() -> Callable[[], object]:
        pool = bench.random(2 * tokens, 2, kv, BLOCK_SIZE, shape.head_dim)
        pairs = torch.arange(2 * tokens, device=bench.device).view(2, tokens).T.contiguous()
        return lambda: backend.copy_blocks(pool, pairs)

    def draw(top_p: float, spread: float = 1.0) -> Callable[[], object]:
        nuclei = NucleusSearch.of(backend)
        sampler = Sampler(shape.vocab, bench.device, backend.greedy_tokens, nuclei, backend.draws)
        logits = bench.random(tokens, shape.vocab) * spread
        rows = [_row_that_draws(number, top_p) for number in range(tokens)]
        return lambda: sampler.start(logits, rows, in_flight={})

    yield replace(case("embed", 2 * row, 0, embed), resident_bytes=shape.vocab * hidden * item + row)
    if tokens <= MOST_SEQUENCES:
        copied_bytes = 4 * tokens * kv * BLOCK_SIZE * shape.head_dim * item
        yield case("copy_blocks (one a token)", copied_bytes, 0, copy)
        yield from linears(bench, model, tokens, "linear head", shape.vocab, hidden, with_quantised=False)
        logits_bytes = tokens * shape.vocab * item
        yield case("greedy tokens", logits_bytes, 0, greedy_tokens)
        # For each logit: its weight in fp32, the cumulative sum in fp64, and their inputs.
        held_bytes = logits_bytes + 24 * tokens * shape.vocab
        yield replace(case("draw, no filter", logits_bytes, 0, partial(draw, 1.0)), resident_bytes=held_bytes)
        # Nine tenths of the probability lie on few tokens, as in real texts, or with standard normal logits on many.
        for name, spread in (("draw, usual top-p", PEAKED_SPREAD), ("draw, wide top-p", 1.0)):
            yield replace(
                case(name, logits_bytes, 0, partial(draw, 0.9, spread)), resident_bytes=2 * held_bytes
            )


def _row_that_draws(number: int, top_p: float) -> ScheduledRow:
    sequence = RunningSequence(
        sequence_id=SequenceId(number),
        tokens=token_array([0]),
        prompt_length=1,
        sampling=SamplingParams(temperature=1.0, top_p=top_p, seed=number),
        names=[],
    )
    return ScheduledRow(sequence=sequence, start=0, num_tokens=1, samples=True)


def _swaps(bench: Bench, model: str, shape: Shape, count: int) -> Iterator[Case]:
    """Yield copies of blocks of all layers to the host and back. They are scattered in the pool only."""

    def host_blocks() -> tuple[HostBlocks, list[BlockId]]:
        num_blocks = 2 * count
        pool = bench.random(shape.layers * num_blocks, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        return HostBlocks(pool, shape.layers, count), [BlockId(block) for block in order[:count]]

    def save() -> Callable[[], object]:
        host, blocks = host_blocks()
        pairs = [(block, HostSlot(slot)) for slot, block in enumerate(blocks)]
        return lambda: host.save(pairs)

    def load() -> Callable[[], object]:
        host, blocks = host_blocks()
        pairs = [(HostSlot(slot), block) for slot, block in enumerate(blocks)]
        host.save([(block, slot) for slot, block in pairs])
        return lambda: host.load(pairs)

    values = 2 * shape.kv_heads * BLOCK_SIZE * shape.head_dim
    num_bytes = 2 * count * shape.layers * values * bench.dtype.itemsize
    for kernel, make in (("blocks to host memory", save), ("blocks from host memory", load)):
        yield Case(
            kernel=kernel,
            model=model,
            shape=f"{count} blocks",
            num_bytes=num_bytes,
            flops=0,
            resident_bytes=2 * num_bytes,
            make=make,
        )


def _linears(shape: Shape) -> Iterator[tuple[str, int, int]]:
    attention = shape.heads * shape.head_dim
    yield "linear qkv", attention + 2 * shape.kv_heads * shape.head_dim, shape.hidden
    yield "linear out", shape.hidden, attention
    yield "linear gate-up", 2 * shape.intermediate, shape.hidden
    yield "linear down", shape.hidden, shape.intermediate
