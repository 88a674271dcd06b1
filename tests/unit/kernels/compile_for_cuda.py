"""Compile every Triton kernel for a GPU that need not be present, and print a row of facts for each.

A kernel whose loop spills registers, or computes a tile while
none loads, is an error.

The interpreter runs kernels as Python, and so accepts code that the compiler refuses. `test_compilation` runs this in a
process without TRITON_INTERPRET. Run it by hand to test another version of triton on the path. `python -m
tests.unit.kernels.compile_for_cuda --write` puts the rows into the docs.
"""

import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from blockyard.kernels.kv_pool import SCALE_BYTES
from blockyard.kernels.triton import (
    attention,
    cache_ops,
    elementwise,
    qk_norm_rope,
    shared_attention,
)
from blockyard.kernels.triton import (
    nucleus as triton_nucleus,
)
from blockyard.kernels.triton.choosing import (
    CHUNK_TOKENS,
    NUCLEUS_THRESHOLDS,
    NUCLEUS_TILE,
    NUCLEUS_WARPS,
)
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


def compile_kernel(
    kernel: Any,
    pointers: dict[str, str],
    scalars: dict[str, str],
    constants: dict[str, Any],
    target: GPUTarget = H100,
    multiples: Collection[str] = (),
    **options: int,
) -> Any:
    """Compile a kernel as a launch does whose pointers, strides of whole heads and `multiples` are multiples of 16."""
    types = pointers | scalars
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (kernel.arg_names.index(name),): ALIGNED
        for name in types
        if name in pointers or name in multiples or ("stride" in name and name != "table_stride_r")
    }
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=target, options=options)


def pool_types(dtype: str, stored: str | None) -> tuple[dict[str, str], dict[str, int]]:
    """Return the types of a pool of the heads' type, or of a pool in 8 bits."""
    pointers = {"pool_ptr": f"*{stored or dtype}", "scales_ptr": "*fp32" if stored else f"*{dtype}"}
    return pointers, {"SCALE_BYTES": SCALE_BYTES if stored else 0}


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
    pool_pointers, pool_constants = pool_types(dtype, stored)
    pointers = {"q_ptr": f"*{dtype}", "table_ptr": "*i32", "items_ptr": "*i32"} | pool_pointers
    pointers |= {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32"}
    integers: tuple[str, ...] = ("q_stride_t", "q_stride_n", "table_stride_r")
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "PROGRAMS_PER_ITEM": 4,
        "BLOCK_M": tiles.rows,
        "BLOCK_J": tiles.keys,
        "WIDEN": False,
        **pool_constants,
    }
    if launch == "shared":
        kernel = shared_attention.attend_shared_kernel
        pointers |= dict.fromkeys(("members_ptr", "partial_starts_ptr"), "*i32")
    else:
        kernel = attention.attend_items_kernel
        pointers |= {"out_ptr": f"*{dtype}", "query_starts_ptr": "*i32", "context_lens_ptr": "*i32"}
        integers = (*integers, "out_stride_t", "out_stride_n", "window")
        constants |= {"DECODES": launch == "decode", "WINDOWED": windowed, "ALIGNED": not windowed}
    scalars = dict.fromkeys(integers, "i32") | {"scale_log2": "fp32"}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return compile_kernel(kernel, pointers, scalars, constants, target, **options)


def compile_merge(dtype: str) -> Any:
    pointers = {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32", "out_ptr": f"*{dtype}"}
    pointers |= {"partial_starts_ptr": "*i32", "query_starts_ptr": "*i32"}
    return compile_kernel(
        attention.merge_partials_kernel,
        pointers,
        {"out_stride_t": "i32", "out_stride_n": "i32"},
        {"NUM_HEADS": 32, "HEAD_DIM": 128, "BLOCK_U": 16},
    )


def compile_write_kv(dtype: str, stored: str | None = None) -> Any:
    pool_pointers, pool_constants = pool_types(dtype, stored)
    return compile_kernel(
        cache_ops.write_kv_kernel,
        {"k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "slots_ptr": "*i64"} | pool_pointers,
        dict.fromkeys(("k_stride_t", "k_stride_k", "v_stride_t", "v_stride_k"), "i32"),
        {"NUM_KV_HEADS": 3, "HEAD_DIM": 64, "BLOCK_SIZE": 16, "HEADS_POW2": 4} | pool_constants,
    )


def compile_qk_norm_rope_write(
    dtype: str, *, normed: bool, stored: str | None = None, norms: str | None = None
) -> Any:
    pool_pointers, pool_constants = pool_types(dtype, stored)
    pointers = dict.fromkeys(("q_norm_ptr", "k_norm_ptr"), f"*{norms or dtype}") | pool_pointers
    pointers["heads_ptr"] = f"*{dtype}"
    pointers |= {"cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "slots_ptr": "*i64"}
    heads = {"NUM_HEADS": 14, "HEADS_POW2": 16, "NUM_KV_HEADS": 2, "KV_HEADS_POW2": 2}
    return compile_kernel(
        qk_norm_rope.qk_norm_rope_write_kernel,
        pointers,
        {"stride_t": "i32", "stride_x": "i32", "eps": "fp32"},
        {"NORMED": normed, "HALF_DIM": 64, "BLOCK_SIZE": 16} | heads | pool_constants,
    )


def compile_copy_blocks(dtype: str) -> Any:
    return compile_kernel(
        cache_ops.copy_blocks_kernel,
        {"pool_ptr": f"*{dtype}", "src_dst_ptr": "*i64"},
        {"block_numel": "i32"},
        {"TILE": 2048},
    )


def compile_rms_norm(
    dtype: str, *, has_residual: bool = False, adds_after: bool = False, weight: str | None = None
) -> Any:
    strides = ("num_rows", "x_stride_t", "residual_stride_t", "out_stride_t")
    return compile_kernel(
        elementwise.rms_norm_kernel,
        dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr"), f"*{dtype}")
        | {"weight_ptr": f"*{weight or dtype}"},
        dict.fromkeys(strides, "i32") | {"eps": "fp32"},
        {"HAS_RESIDUAL": has_residual, "ADDS_AFTER": adds_after}
        | {"HIDDEN": 100, "HIDDEN_POW2": 128, "BLOCK_M": 16},
    )


def compile_rotary(dtype: str) -> Any:
    return compile_kernel(
        elementwise.rotary_kernel,
        {"q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "cos_sin_ptr": "*fp32", "positions_ptr": "*i64"},
        dict.fromkeys(("q_stride_t", "q_stride_n", "k_stride_t", "k_stride_k"), "i32"),
        {"NUM_HEADS": 14, "HEADS_POW2": 16, "NUM_KV_HEADS": 2, "KV_HEADS_POW2": 2, "HALF_DIM": 32},
    )


def compile_silu_mul(dtype: str, *, is_gelu: bool = False) -> Any:
    return compile_kernel(
        elementwise.silu_mul_kernel,
        {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"},
        dict.fromkeys(("width", "gate_up_stride_t", "out_stride_t"), "i32"),
        {"GELU": is_gelu, "TILE": 1024},
    )


def compile_grouped_linear(dtype: str, num_tokens: int, *, gated: bool, target: GPUTarget = H100) -> Any:
    """Compile the product of experts with the tiles for so many tokens."""
    tiles = experts.expert_tiles(num_tokens, dtype=TORCH_DTYPES[dtype])
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}")
    pointers |= dict.fromkeys(("pairs_ptr", "tiles_ptr"), "*i32")
    strides = ("x_stride", "out_stride", "weight_stride_e", "weight_stride_o")
    return compile_kernel(
        experts.grouped_linear_kernel,
        pointers,
        dict.fromkeys(("num_pairs", "num_inputs", "num_outputs", *strides), "i32"),
        {
            "PAIRS_A_ROW": 8 if gated else 1,
            "GATED": gated,
            "BLOCK_M": tiles.rows,
            "BLOCK_N": tiles.outputs,
            "BLOCK_J": tiles.inputs,
            "WIDEN": False,
        },
        target,
        multiples=("num_inputs",),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def compile_grouped_linears(dtype: str, *, is_quick: bool) -> dict[str, Any]:
    targets = {"": H100} | ({", consumer GPU": CONSUMER} if dtype == "bf16" and not is_quick else {})
    return {
        f"experts {'gate-up' if gated else 'down'}, {of}{suffix}": compile_grouped_linear(
            dtype, tokens, gated=gated, target=target
        )
        for suffix, target in targets.items()
        for of, tokens in (("decodes", 1), ("prompts", 256))
        for gated in ((True,) if is_quick else (True, False))
    }


def compile_choice_of_experts(dtype: str) -> dict[str, Any]:
    """Compile what is beside the products: the choice of 8 of 128 experts, the order of pairs, and the sum."""
    sizes = {"NUM_EXPERTS": 128, "EXPERTS_POW2": 128, "TOP_K": 8, "NORMALIZES": True}
    return {
        "choose_experts": compile_kernel(
            experts.choose_experts_kernel,
            {"logits_ptr": f"*{dtype}", "experts_ptr": "*i32", "weights_ptr": "*fp32"},
            {"logits_stride_t": "i32"},
            sizes,
        ),
        "sort_pairs": compile_kernel(
            experts.sort_pairs_kernel,
            dict.fromkeys(("experts_ptr", "pairs_ptr", "tiles_ptr"), "*i32"),
            {"num_pairs": "i32", "num_tiles": "i32"},
            {"EXPERTS_POW2": 256, "BLOCK_M": 16, "TILE": experts.PAIRS_TILE},
        ),
        "add_experts": compile_kernel(
            experts.add_experts_kernel,
            {"pairs_ptr": f"*{dtype}", "weights_ptr": "*fp32", "out_ptr": f"*{dtype}"},
            {"hidden": "i32", "out_stride_t": "i32"},
            {"TOP_K": 8, "TILE": experts.SUM_TILE},
        ),
    }


def compile_lora(kernel: Any, dtype: str) -> Any:
    pointers = {
        name: f"*{dtype}" for name in ("x_ptr", "a_ptr", "b_ptr", "out_ptr") if name in kernel.arg_names
    }
    indices = ("ranks_ptr", "starts_ptr", "tokens_ptr", "items_ptr")
    pointers |= {name: "*i32" for name in indices if name in kernel.arg_names} | {"between_ptr": "*fp32"}
    integers = [name for name in ("num_tokens", "x_stride_t", "out_stride_t") if name in kernel.arg_names]
    sizes = {"NUM_INPUTS": 4096, "NUM_OUTPUTS": 6144, "NUM_PARTS": 3, "MAX_RANK": 16, "SPLITS": lora.SPLITS}
    tiles = {
        "BLOCK_T": lora.ITEM_TOKENS,
        "BLOCK_R": 16,
        "BLOCK_I": lora.INPUT_TILE,
        "BLOCK_O": lora.OUTPUT_TILE,
    }
    constants = {name: value for name, value in (sizes | tiles).items() if name in kernel.arg_names}
    return compile_kernel(kernel, pointers, dict.fromkeys(integers, "i32"), constants | {"WIDEN": False})


def compile_top_k_top_p() -> dict[str, Any]:
    """Compile all kernels of the search, for a vocabulary of 32 chunks."""
    filters = {"top_k_ptr": "*i64", "top_p_ptr": "*fp64", "pending_ptr": "*i1"}
    last = {"last_thresholds_ptr": "*i32", "last_counts_ptr": "*i32", "last_masses_ptr": "*fp64"}
    found = {"thresholds_ptr": "*i32", "counts_ptr": "*i32", "masses_ptr": "*fp64"}
    sizes = {"vocab_size": "i32", "num_chunks": "i32"}
    rows = sizes | {"weights_stride_f": "i32"}
    constants = {"NUM_THRESHOLDS": NUCLEUS_THRESHOLDS, "CHUNKS_POW2": 32}
    tile, chunk, warps = {"TILE": NUCLEUS_TILE}, {"CHUNK": CHUNK_TOKENS}, {"num_warps": NUCLEUS_WARPS}
    compiled = {
        f"sums_above{' first' if is_first else ''}": compile_kernel(
            triton_nucleus.sums_above_kernel,
            {"weights_ptr": "*fp32"} | filters | last | found,
            rows,
            {"IS_FIRST": is_first} | chunk | tile | constants,
            **warps,
        )
        for is_first in (True, False)
    }
    compiled["gather_nearest"] = compile_kernel(
        triton_nucleus.gather_nearest_kernel,
        {"weights_ptr": "*fp32", "nearest_ptr": "*fp32"} | filters | last,
        rows,
        chunk | constants,
    )
    compiled["top_k_top_p"] = compile_kernel(
        triton_nucleus.top_k_top_p_kernel,
        {"nearest_ptr": "*fp32", "threshold_ptr": "*fp32"} | filters | last,
        sizes,
        tile | constants,
        **warps,
    )
    return compiled


def compile_attentions(dtype: str, *, is_quick: bool) -> dict[str, Any]:
    """Compile the launches of attention. A quick run compiles one of several shapes that differ little."""
    shapes: dict[str, Any] = {"": {}}
    if dtype == "bf16":
        shapes[", consumer GPU"] = {"target": CONSUMER}
    if not is_quick:
        shapes[", head size 64"] = {"head_dim": 64}
        if dtype == "bf16":  # Qwen3-0.6B's and Qwen3-14B's
            shapes |= {f", group {group}": {"group": group} for group in (2, 5)}
    shapes |= {
        f", KV in {stored}": {"stored": stored}
        for stored in (("u8", "fp8e4nv") if is_quick else ("i8", "u8", "fp8e4nv"))
    }
    compiled = {
        f"{launch}{shape}": compile_attention(launch, dtype, **options)
        for shape, options in shapes.items()
        for launch in get_args(Launch)
    }
    compiled["prefill, window"] = compile_attention("prefill", dtype, windowed=True)
    if dtype == "bf16":
        for stored in ("u8", "fp8e4nv"):
            compiled[f"decode, KV in {stored} beside fp16"] = compile_attention(
                "decode", "fp16", stored=stored
            )
    return compiled


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


def compile_others(dtype: str, *, is_quick: bool) -> dict[str, Any]:
    compiled = {
        "merge": compile_merge(dtype),
        "write_kv": compile_write_kv(dtype),
        "copy_blocks": compile_copy_blocks(dtype),
        "rms_norm": compile_rms_norm(dtype),
        "add_rms_norm": compile_rms_norm(dtype, has_residual=True),
        "rms_norm_add with an fp32 weight": compile_rms_norm(dtype, adds_after=True, weight="fp32"),
        "rotary": compile_rotary(dtype),
        "silu_mul": compile_silu_mul(dtype),
        "gelu_mul": compile_silu_mul(dtype, is_gelu=True),
        "shrink of adapters": compile_lora(lora.shrink_kernel, dtype),
        "expand of adapters": compile_lora(lora.expand_kernel, dtype),
        "qk_norm_rope_write": compile_qk_norm_rope_write(dtype, normed=False),
        "qk_norm_rope_write with norms": compile_qk_norm_rope_write(dtype, normed=True),
        "qk_norm_rope_write with fp32 norms": compile_qk_norm_rope_write(dtype, normed=True, norms="fp32"),
    }
    for stored in ("u8", "fp8e4nv") if is_quick else ("i8", "u8", "fp8e4nv"):
        compiled[f"write_kv to {stored}"] = compile_write_kv(dtype, stored)
        compiled[f"qk_norm_rope_write to {stored}"] = compile_qk_norm_rope_write(
            dtype, normed=True, stored=stored
        )
    compiled |= compile_choice_of_experts(dtype)
    if dtype == "bf16":  # The weights of a draw are fp32 always.
        compiled |= compile_top_k_top_p()
    return compiled


def main(dtypes: Sequence[str], *, is_quick: bool) -> list[str]:
    """Compile, check and print all kernels. Return the rows in bf16 of those that multiply, which the docs show."""
    shown = []
    for dtype in dtypes:
        products = compile_attentions(dtype, is_quick=is_quick)
        products |= compile_grouped_linears(dtype, is_quick=is_quick)
        for name, kernel in products.items():
            facts = facts_of(kernel)
            check_conversions(f"{name}, {dtype}", kernel.asm["ptx"])
            assert facts.shared_bytes <= MAX_SHARED_BYTES[kernel.metadata.target], (name, dtype, facts)
            if dtype != "fp32":  # No tensor cores, and tiles of few keys: its pipeline is no concern.
                assert facts.loop, (name, facts)
                assert not facts.loop_spills, (name, facts)
                assert facts.tiles_in_flight, (name, facts)
            print(facts.row(f"{name}, {dtype}"))
            if dtype == "bf16":
                shown.append(facts.row(f"{name}, {dtype}"))
        for name, kernel in compile_others(dtype, is_quick=is_quick).items():
            check_conversions(f"{name}, {dtype}", kernel.asm["ptx"])
            facts = facts_of(kernel)
            print(facts.row(f"{name}, {dtype}"))
            if dtype == "bf16" and facts.tiles_in_flight:
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
    if sys.argv[1:] == ["--quick"]:
        main(["bf16"], is_quick=True)
    else:
        rows = main(["fp32", "bf16"], is_quick=False)
        if sys.argv[1:] == ["--write"]:
            write(rows, Path("docs/performance.md"))
