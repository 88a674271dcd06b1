"""Compile every Triton kernel for a GPU that need not be present, and print one line each.

The interpreter runs kernels as Python, and so accepts code that the compiler refuses. `test_compilation` runs this in a
process without TRITON_INTERPRET. Run it by hand to test another version of triton on the path.
"""

import re
import sys
from collections.abc import Sequence
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
from blockyard.kernels.triton.backend import NUCLEUS_TILE, NUCLEUS_WARPS
from blockyard.kernels.triton.tiles import Launch, Tiles, attention_tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

H100 = GPUTarget("cuda", 90, 32)
# Of one program.
MAX_SHARED_BYTES = 227 << 10
ALIGNED = [["tt.divisibility", 16]]


def compile_kernel(
    kernel: Any, pointers: dict[str, str], scalars: dict[str, str], constants: dict[str, Any], **options: int
) -> Any:
    """Compile a kernel as a launch does whose pointers and strides of whole heads are multiples of 16."""
    types = pointers | scalars
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (kernel.arg_names.index(name),): ALIGNED
        for name in types
        if name in pointers or ("stride" in name and name != "table_stride_r")
    }
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=H100, options=options)


def pool_types(dtype: str, stored: str | None) -> tuple[dict[str, str], dict[str, int]]:
    """Return the types of a pool of the heads' type, or of a pool in 8 bits."""
    pointers = {"pool_ptr": f"*{stored or dtype}", "scales_ptr": "*fp32" if stored else f"*{dtype}"}
    return pointers, {"SCALE_BYTES": SCALE_BYTES if stored else 0}


def compile_attention(
    dtype: str,
    head_dim: int,
    tiles: Tiles,
    *,
    group: int = 4,
    decodes: bool = False,
    windowed: bool = False,
    stored: str | None = None,
) -> Any:
    integers = ("q_stride_t", "q_stride_n", "out_stride_t", "out_stride_n", "table_stride_r", "window")
    pool_pointers, pool_constants = pool_types(dtype, stored)
    pointers = dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}") | pool_pointers
    pointers |= dict.fromkeys(("table_ptr", "query_starts_ptr", "context_lens_ptr", "items_ptr"), "*i32")
    pointers |= {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32"}
    return compile_kernel(
        attention.attend_items_kernel,
        pointers,
        dict.fromkeys(integers, "i32") | {"scale_log2": "fp32"},
        {
            "NUM_KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "PROGRAMS_PER_ITEM": 4,
            "BLOCK_M": tiles.rows,
            "BLOCK_J": tiles.keys,
            "DECODES": decodes,
            "WINDOWED": windowed,
            "ALIGNED": not windowed,
            "CARRIED": tiles.carried,
            "WIDEN": False,
            **pool_constants,
        },
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def compile_shared(
    dtype: str, head_dim: int, tiles: Tiles, stored: str | None = None, *, group: int = 4
) -> Any:
    pool_pointers, pool_constants = pool_types(dtype, stored)
    pointers = {"q_ptr": f"*{dtype}"} | pool_pointers
    pointers |= dict.fromkeys(("table_ptr", "members_ptr", "items_ptr", "partial_starts_ptr"), "*i32")
    pointers |= {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32"}
    return compile_kernel(
        shared_attention.attend_shared_kernel,
        pointers,
        dict.fromkeys(("q_stride_t", "q_stride_n", "table_stride_r"), "i32") | {"scale_log2": "fp32"},
        {
            "NUM_KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "PROGRAMS_PER_ITEM": 1,
            "BLOCK_M": tiles.rows,
            "BLOCK_J": tiles.keys,
            "CARRIED": tiles.carried,
            "WIDEN": False,
            **pool_constants,
        },
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


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


def compile_qk_norm_rope_write(dtype: str, *, normed: bool, stored: str | None = None) -> Any:
    pool_pointers, pool_constants = pool_types(dtype, stored)
    pointers = dict.fromkeys(("heads_ptr", "q_norm_ptr", "k_norm_ptr"), f"*{dtype}") | pool_pointers
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


def compile_rms_norm(dtype: str, has_residual: bool) -> Any:
    strides = ("num_rows", "x_stride_t", "residual_stride_t", "out_stride_t")
    return compile_kernel(
        elementwise.rms_norm_kernel,
        dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), f"*{dtype}"),
        dict.fromkeys(strides, "i32") | {"eps": "fp32"},
        {"HAS_RESIDUAL": has_residual, "HIDDEN": 100, "HIDDEN_POW2": 128, "BLOCK_M": 16},
    )


def compile_rotary(dtype: str) -> Any:
    return compile_kernel(
        elementwise.rotary_kernel,
        {"q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "cos_sin_ptr": "*fp32", "positions_ptr": "*i64"},
        dict.fromkeys(("q_stride_t", "q_stride_n", "k_stride_t", "k_stride_k"), "i32"),
        {"NUM_HEADS": 14, "HEADS_POW2": 16, "NUM_KV_HEADS": 2, "KV_HEADS_POW2": 2, "HALF_DIM": 32},
    )


def compile_silu_mul(dtype: str) -> Any:
    return compile_kernel(
        elementwise.silu_mul_kernel,
        {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"},
        dict.fromkeys(("width", "gate_up_stride_t", "out_stride_t"), "i32"),
        {"TILE": 1024},
    )


def compile_top_k_top_p() -> Any:
    pointers = {"weights_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp64", "pending_ptr": "*i1"}
    return compile_kernel(
        triton_nucleus.top_k_top_p_kernel,
        pointers | {"threshold_ptr": "*fp32"},
        {"weights_stride_f": "i32", "vocab_size": "i32"},
        {"TILE": NUCLEUS_TILE},
        num_warps=NUCLEUS_WARPS,
    )


def tiles_of(
    launch: Launch, dtype: torch.dtype, *, group: int = 4, head_dim: int = 128, stored: str | None = None
) -> Tiles:
    return attention_tiles(
        launch,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        is_quantised=stored is not None,
        shared_bytes=MAX_SHARED_BYTES,
    )


def check_conversions(name: str, ptx: str) -> None:
    """Check that e4m3 is converted by instructions, and that values in 8 bits do not leave shared memory one by one.

    fp32 has no tensor cores that read columns of 16 bits.
    """
    if " of fp8e4nv " in name:
        assert "cvt.rn.f16x2.e4m3x2" in ptx, name
    if " to fp8e4nv " in name:
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx, name
    if " of fp8e4nv " in name or " of i8 " in name:
        assert name.endswith("fp32") or not re.search(r"ld\.shared\.[bsu]8\b", ptx), name


def main(dtypes: Sequence[str], *, is_quick: bool) -> None:
    """A quick run compiles one of several shapes that differ little."""
    for dtype in dtypes:
        torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        compiled = {"merge": compile_merge(dtype)}
        for head_dim in (128,) if is_quick else (64, 128):
            decode, prefill, shared = (
                tiles_of(launch, torch_dtype, head_dim=head_dim) for launch in get_args(Launch)
            )
            compiled[f"decode, head size {head_dim},"] = compile_attention(
                dtype, head_dim, decode, decodes=True
            )
            compiled[f"prefill, head size {head_dim},"] = compile_attention(dtype, head_dim, prefill)
            compiled[f"shared, head size {head_dim},"] = compile_shared(dtype, head_dim, shared)
        for group in (2, 5) if dtype == "bf16" and not is_quick else ():  # Qwen3-0.6B's and Qwen3-14B's
            decode, prefill, shared = (
                tiles_of(launch, torch_dtype, group=group) for launch in get_args(Launch)
            )
            compiled |= {
                f"decode, group {group},": compile_attention(dtype, 128, decode, group=group, decodes=True),
                f"prefill, group {group},": compile_attention(dtype, 128, prefill, group=group),
                f"shared, group {group},": compile_shared(dtype, 128, shared, group=group),
            }
        tiles = tiles_of("prefill", torch_dtype)
        compiled["prefill in a window"] = compile_attention(dtype, 128, tiles, windowed=True)
        compiled |= {"write_kv": compile_write_kv(dtype), "copy_blocks": compile_copy_blocks(dtype)}
        compiled |= {
            "rms_norm": compile_rms_norm(dtype, False),
            "add_rms_norm": compile_rms_norm(dtype, True),
        }
        compiled |= {"rotary": compile_rotary(dtype), "silu_mul": compile_silu_mul(dtype)}
        compiled["qk_norm_rope_write"] = compile_qk_norm_rope_write(dtype, normed=False)
        compiled["qk_norm_rope_write with norms"] = compile_qk_norm_rope_write(dtype, normed=True)
        for stored in ("u8", "fp8e4nv") if is_quick else ("i8", "u8", "fp8e4nv"):
            decode, prefill, shared = (
                tiles_of(launch, torch_dtype, stored=stored) for launch in get_args(Launch)
            )
            compiled |= {
                f"decode of {stored}": compile_attention(dtype, 128, decode, stored=stored, decodes=True),
                f"prefill of {stored}": compile_attention(dtype, 128, prefill, stored=stored),
                f"shared of {stored}": compile_shared(dtype, 128, shared, stored),
                f"write_kv to {stored}": compile_write_kv(dtype, stored),
                f"qk_norm_rope_write to {stored}": compile_qk_norm_rope_write(
                    dtype, normed=True, stored=stored
                ),
            }
        if dtype == "bf16":
            half = tiles_of("decode", torch.float16, stored="u8")
            for stored in ("u8", "fp8e4nv"):
                compiled[f"decode of {stored} beside fp16, not"] = compile_attention(
                    "fp16", 128, half, stored=stored, decodes=True
                )
            compiled["top_k_top_p_thresholds"] = (
                compile_top_k_top_p()
            )  # the weights of a draw are fp32 always
        for name, kernel in compiled.items():
            assert kernel.metadata.shared <= MAX_SHARED_BYTES, (name, dtype)
            check_conversions(f"{name} {dtype}", kernel.asm["ptx"])
            print(f"{name} {dtype}: {kernel.metadata.shared} bytes of shared memory")


if __name__ == "__main__":
    if sys.argv[1:] == ["--quick"]:
        main(["bf16"], is_quick=True)
    else:
        main(["fp32", "bf16"], is_quick=False)
