"""Compile every Triton kernel for a GPU that need not be present, and print a row of facts for each.

A kernel whose loop spills registers, or computes a tile while none loads, is an error.

The interpreter runs kernels as Python, and so accepts code that the compiler refuses. `test_compilation` runs this in a
process without TRITON_INTERPRET. Run it by hand to test another version of triton on the path. `python -m
tests.nightly.kernels.compile_for_cuda --write` puts the rows into the docs.
"""

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from blockyard.kernels.kv_pool import SCALE_BYTES
from blockyard.kernels.triton import attention, cache_ops, elementwise, qk_norm_rope, shared_attention
from blockyard.kernels.triton import nucleus as triton_nucleus
from blockyard.kernels.triton.choosing import CHUNK_TOKENS, NUCLEUS_THRESHOLDS, NUCLEUS_TILE, NUCLEUS_WARPS
from blockyard.kernels.triton.linears import experts, lora
from blockyard.kernels.triton.tiles import Launch, attention_tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .compiled_code import COLUMNS, HEADS, facts_of

H100, CONSUMER = (GPUTarget("cuda", capability, 32) for capability in (90, 89))
# Of one program.
MAX_SHARED_BYTES = {H100: 227 << 10, CONSUMER: 99 << 10}
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ALIGNED = [["tt.divisibility", 16]]
POINTERS = {
    "i32": "table items members partial_starts query_starts context_lens pairs tiles experts ranks starts tokens "
    "last_thresholds last_counts thresholds counts order",
    "i64": "slots positions src_dst top_k",
    "fp32": "partial_out partial_lse cos_sin weights between nearest threshold x_scale scale partial",
    "fp64": "top_p last_masses masses",
    "i1": "pending",
}
"""Types that a pointer of a name has in each kernel. All others point to numbers of the step's type."""
TYPE_OF = {f"{name}_ptr": f"*{kind}" for kind, names in POINTERS.items() for name in names.split()}


def compile_kernel(
    kernel: Any,
    dtype: str,
    constants: Mapping[str, Any],
    target: GPUTarget = H100,
    *,
    pointers: Mapping[str, str] = {},
    multiples: Collection[str] = (),
    **options: int,
) -> Any:
    """Compile a kernel as a launch does whose pointers, strides of whole heads and `multiples` are multiples of 16.

    Constants that the kernel does not have are left out. `pointers` are those with another type than `TYPE_OF` says.
    """
    names = kernel.arg_names
    signature = {name: "fp32" if name in ("eps", "scale_log2") else "i32" for name in names}
    signature |= {name: TYPE_OF.get(name, f"*{dtype}") for name in names if name.endswith("_ptr")}
    signature |= {name: f"*{kind}" for name, kind in pointers.items() if name in signature}
    given = {name: value for name, value in constants.items() if name in signature}
    signature |= dict.fromkeys(given, "constexpr")
    aligned = {
        (names.index(name),): ALIGNED
        for name in names
        if name.endswith("_ptr") or name in multiples or ("stride" in name and name != "table_stride_r")
    }
    constexprs = {(names.index(name),): value for name, value in given.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=target, options=options)


def in_pool(dtype: str, stored: str | None) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the types and constants of a pool of the heads' type, or of a pool in 8 bits."""
    pointers = {"pool_ptr": stored or dtype, "scales_ptr": "fp32" if stored else dtype}
    return pointers, {"SCALE_BYTES": SCALE_BYTES if stored else 0, "BLOCK_SIZE": 16}


def compile_attention(
    launch: Launch,
    dtype: str,
    *,
    group: int = 4,
    head_dim: int = 128,
    windowed: bool = False,
    stored: str | None = None,
    target: GPUTarget = H100,
) -> Any:
    """Compile the kernel of a launch with the tiles that the backend would choose on the GPU."""
    tiles = attention_tiles(
        launch,
        group=group,
        head_dim=head_dim,
        dtype=TORCH_DTYPES[dtype],
        is_quantised=stored is not None,
        shared_bytes=MAX_SHARED_BYTES[target],
    )
    pointers, constants = in_pool(dtype, stored)
    constants |= {"NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "PROGRAMS_PER_ITEM": 4}
    constants |= {"BLOCK_M": tiles.rows, "BLOCK_J": tiles.keys, "WIDEN": False}
    constants |= {"DECODES": launch == "decode", "WINDOWED": windowed, "ALIGNED": not windowed}
    kernel = shared_attention.attend_shared_kernel if launch == "shared" else attention.attend_items_kernel
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return compile_kernel(kernel, dtype, constants, target, pointers=pointers, **options)


def compile_grouped_linear(dtype: str, num_tokens: int, *, gated: bool, target: GPUTarget) -> Any:
    """Compile the product of experts with the tiles for so many tokens."""
    tiles = experts.expert_tiles(num_tokens, dtype=TORCH_DTYPES[dtype])
    constants = {"PAIRS_A_ROW": 8 if gated else 1, "GATED": gated, "WIDEN": False}
    constants |= {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.outputs, "BLOCK_J": tiles.inputs}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    kernel = experts.grouped_linear_kernel
    return compile_kernel(kernel, dtype, constants, target, multiples=("num_inputs",), **options)


def compile_products(dtype: str, *, is_quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield attention and experts by name. A quick run compiles one of several shapes that differ little."""
    stores = ("u8", "fp8e4nv") if is_quick else ("i8", "u8", "fp8e4nv")
    shapes: dict[str, Any] = {"": {}}
    if dtype == "bf16":
        shapes[", consumer GPU"] = {"target": CONSUMER}
    if not is_quick:
        shapes[", head size 64"] = {"head_dim": 64}
        if dtype == "bf16":  # Qwen3-0.6B's and Qwen3-14B's
            shapes |= {f", group {group}": {"group": group} for group in (2, 5)}
    shapes |= {f", KV in {stored}": {"stored": stored} for stored in stores}
    for shape, options in shapes.items():
        for launch in get_args(Launch):
            yield f"{launch}{shape}", compile_attention(launch, dtype, **options)
    yield "prefill, window", compile_attention("prefill", dtype, windowed=True)
    for stored in ("u8", "fp8e4nv") if dtype == "bf16" else ():
        yield f"decode, KV in {stored} beside fp16", compile_attention("decode", "fp16", stored=stored)
    targets = {"": H100} | ({", consumer GPU": CONSUMER} if dtype == "bf16" and not is_quick else {})
    for suffix, target in targets.items():
        for of, tokens in (("decodes", 1), ("prompts", 256)):
            for gated in (True,) if is_quick else (True, False):
                name = f"experts {'gate-up' if gated else 'down'}, {of}{suffix}"
                yield name, compile_grouped_linear(dtype, tokens, gated=gated, target=target)


HEADS_OF = {"NUM_HEADS": 14, "HEADS_POW2": 16, "NUM_KV_HEADS": 2, "KV_HEADS_POW2": 2}
NORM = {"HIDDEN": 100, "HIDDEN_POW2": 128, "BLOCK_M": 16, "HAS_RESIDUAL": False, "ADDS_AFTER": False}
LORA = {
    "NUM_INPUTS": 4096,
    "NUM_OUTPUTS": 6144,
    "NUM_PARTS": 3,
    "MAX_RANK": 16,
    "SPLITS": lora.SPLITS,
    "BLOCK_T": lora.ITEM_TOKENS,
    "BLOCK_R": 16,
    "BLOCK_I": lora.INPUT_TILE,
    "BLOCK_O": lora.OUTPUT_TILE,
    "WIDEN": False,
}
FP32_NORMS = {"q_norm_ptr": "fp32", "k_norm_ptr": "fp32"}
OTHERS: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "merge": (attention.merge_partials_kernel, {"NUM_HEADS": 32, "HEAD_DIM": 128, "BLOCK_U": 16}, {}),
    "copy_blocks": (cache_ops.copy_blocks_kernel, {"TILE": 2048}, {}),
    "rms_norm": (elementwise.rms_norm_kernel, NORM, {}),
    "add_rms_norm": (elementwise.rms_norm_kernel, NORM | {"HAS_RESIDUAL": True}, {}),
    "rms_norm_add with an fp32 weight": (
        elementwise.rms_norm_kernel,
        NORM | {"ADDS_AFTER": True},
        {"weight_ptr": "fp32"},
    ),
    "rotary": (elementwise.rotary_kernel, HEADS_OF | {"HALF_DIM": 32}, {}),
    "silu_mul": (elementwise.silu_mul_kernel, {"GELU": False, "TILE": 1024}, {}),
    "gelu_mul": (elementwise.silu_mul_kernel, {"GELU": True, "TILE": 1024}, {}),
    "shrink of adapters": (lora.shrink_kernel, LORA, {}),
    "expand of adapters": (lora.expand_kernel, LORA, {}),
    "choose_experts": (
        experts.choose_experts_kernel,
        {"NUM_EXPERTS": 128, "EXPERTS_POW2": 128, "TOP_K": 8, "NORMALIZES": True},
        {},
    ),
    "sort_pairs": (
        experts.sort_pairs_kernel,
        {"EXPERTS_POW2": 256, "BLOCK_M": 16, "TILE": experts.PAIRS_TILE},
        {},
    ),
    "add_experts": (experts.add_experts_kernel, {"TOP_K": 8, "TILE": experts.SUM_TILE}, {"pairs_ptr": ""}),
}
"""Kernels around the products: constants, and pointers whose types differ. "" is the type of the step."""
NUCLEUS = {
    "sums_above first": (triton_nucleus.sums_above_kernel, {"IS_FIRST": True}),
    "sums_above": (triton_nucleus.sums_above_kernel, {"IS_FIRST": False}),
    "gather_nearest": (triton_nucleus.gather_nearest_kernel, {}),
    "top_k_top_p": (triton_nucleus.top_k_top_p_kernel, {}),
}


def compile_others(dtype: str, *, is_quick: bool) -> Iterator[tuple[str, Any]]:
    for name, (kernel, constants, pointers) in OTHERS.items():
        types = {pointer: kind or dtype for pointer, kind in pointers.items()}
        yield name, compile_kernel(kernel, dtype, constants, pointers=types)
    for stored in (None, "u8", "fp8e4nv") if is_quick else (None, "i8", "u8", "fp8e4nv"):
        pool_types, pool = in_pool(dtype, stored)
        to, placing = f" to {stored}" if stored else "", qk_norm_rope.qk_norm_rope_write_kernel
        written = pool | {"NUM_KV_HEADS": 3, "HEAD_DIM": 64, "HEADS_POW2": 4}
        placed = pool | HEADS_OF | {"HALF_DIM": 64, "NORMED": True}
        yield (
            f"write_kv{to}",
            compile_kernel(cache_ops.write_kv_kernel, dtype, written, pointers=pool_types),
        )
        name = f"qk_norm_rope_write{to or ' with norms'}"
        yield name, compile_kernel(placing, dtype, placed, pointers=pool_types)
        if stored is None:
            plain = placed | {"NORMED": False}
            yield "qk_norm_rope_write", compile_kernel(placing, dtype, plain, pointers=pool_types)
            name = "qk_norm_rope_write with fp32 norms"
            yield name, compile_kernel(placing, dtype, placed, pointers=pool_types | FP32_NORMS)
    if dtype == "bf16":  # The weights of a draw are fp32 always.
        sizes = {"NUM_THRESHOLDS": NUCLEUS_THRESHOLDS, "CHUNKS_POW2": 32, "CHUNK": CHUNK_TOKENS}
        for name, (kernel, constants) in NUCLEUS.items():
            options = {} if name == "gather_nearest" else {"num_warps": NUCLEUS_WARPS}
            constants = sizes | {"TILE": NUCLEUS_TILE} | constants
            yield name, compile_kernel(kernel, "fp32", constants, **options)


def check_conversions(name: str, ptx: str) -> None:
    """Check that e4m3 is converted by instructions, and that values in 8 bits do not leave shared memory one by one.

    fp32 has no tensor cores that read columns of 16 bits.
    """
    if "KV in fp8e4nv" in name:
        assert "cvt.rn.f16x2.e4m3x2" in ptx, name
    if " to fp8e4nv," in name:
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx, name
    if "KV in fp8e4nv" in name or "KV in i8" in name:
        assert name.endswith("fp32") or not re.search(r"ld\.shared\.[bsu]8\b", ptx), name


def main(dtypes: Sequence[str], *, is_quick: bool) -> list[str]:
    """Compile, check and print all kernels. Return the rows in bf16 of those that multiply, which the docs show."""
    shown = []
    for dtype in dtypes:
        products = ((True, *each) for each in compile_products(dtype, is_quick=is_quick))
        others = ((False, *each) for each in compile_others(dtype, is_quick=is_quick))
        for is_product, name, kernel in chain(products, others):
            facts = facts_of(kernel)
            check_conversions(f"{name}, {dtype}", kernel.asm["ptx"])
            if is_product:
                assert facts.shared_bytes <= MAX_SHARED_BYTES[kernel.metadata.target], (name, dtype, facts)
            if is_product and dtype != "fp32":  # No tensor cores, and tiles of few keys.
                assert facts.loop, (name, facts)
                assert not facts.loop_spills, (name, facts)
                assert facts.tiles_in_flight, (name, facts)
            print(facts.row(f"{name}, {dtype}"))
            if dtype == "bf16" and (is_product or facts.tiles_in_flight):
                shown.append(facts.row(f"{name}, {dtype}"))
    return shown


def write(rows: Sequence[str], path: Path, heads: str = HEADS) -> None:
    """Replace the table with these heads in the docs, and the version of triton that its text names."""
    text = re.sub(r"\(triton \d[\w.]*\)", f"(triton {triton.__version__})", path.read_text())
    before, table = text.split(heads)
    after = table.split("\n\n", 1)[1]
    rules = "|---" * len(COLUMNS) + "|"
    path.write_text("\n".join((before + heads, rules, *rows)) + "\n\n" + after)


if __name__ == "__main__":
    is_quick = sys.argv[1:] == ["--quick"]
    rows = main(["bf16"] if is_quick else ["fp32", "bf16"], is_quick=is_quick)
    if sys.argv[1:] == ["--write"]:
        write(rows, Path("bench/reports/compiled-kernels.md"))
