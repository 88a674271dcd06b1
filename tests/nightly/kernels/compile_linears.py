"""Compile Triton's linears with weights of 4 and 8 bits for GPUs that need not be present, and print a row for each.

A product whose loop spills registers, or computes a tile while none loads, is an error. `test_compilation` runs this in
a process without TRITON_INTERPRET. `python -m tests.nightly.kernels.compile_linears --write` writes the docs' rows.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from blockyard.kernels.triton.linears.choice import (
    DEQUANTISE_WARPS,
    DEQUANTISED_OUTPUTS,
    WARM_UP_TOKENS,
    LinearTiles,
    linear_tiles,
)
from blockyard.kernels.triton.linears.expert_products import quantised_experts_kernel
from blockyard.kernels.triton.linears.experts import expert_tiles
from blockyard.kernels.triton.linears.inputs import quantise_inputs_kernel, warps_of
from blockyard.kernels.triton.linears.launches import SUM_TILE, form_of
from blockyard.kernels.triton.linears.product import (
    dequantise_kernel,
    quantised_linear_kernel,
    sum_parts_kernel,
)
from blockyard.kernels.triton.linears.weights import TiledWeight, tiled
from triton.backends.compiler import GPUTarget

from tests.unit.kernels.weights import fp8_weight, int4_weight, int8_weight

from .compile_for_cuda import CONSUMER, H100, MAX_SHARED_BYTES, TORCH_DTYPES, compile_kernel, write
from .compiled_code import LINEAR_HEADS, facts_of

A100, B200, NEW_CONSUMER = (GPUTarget("cuda", capability, 32) for capability in (80, 100, 120))
NAMES = {
    A100: "A100",
    H100: "H100",
    B200: "B200",
    CONSUMER: "consumer GPU",
    NEW_CONSUMER: "consumer Blackwell",
}
ELSEWHERE = (A100, B200, CONSUMER, NEW_CONSUMER)
LIMITS = MAX_SHARED_BYTES | {A100: 163 << 10, B200: 227 << 10, NEW_CONSUMER: 99 << 10}
FEW, SOME, MANY = WARM_UP_TOKENS
EXPERT_TOKENS = (FEW, MANY)
"""One number of tokens for each size of tiles of experts."""
PLAINEST = ("int4", "int8 in groups", "fp8 in blocks")
TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, "i8": tl.int8, "fp8e4nv": tl.float8e4nv}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A weight, the type of its numbers, and that of inputs in 8 bits with the groups of their scales."""

    weight: TiledWeight
    numbers: str
    inputs: str | None = None

    @property
    def x_scales(self) -> str:
        if self.inputs is None:
            return "none"
        return "unit" if self.weight.units_a_group else "token"


BF16 = torch.bfloat16
SCHEMES = {
    "int4": Scheme(weight=tiled(int4_weight(64, 256, 128, BF16)), numbers="u8"),
    "int4 without zero points": Scheme(
        weight=tiled(int4_weight(64, 256, 128, BF16, has_zeros=False)), numbers="u8"
    ),
    "int4 in groups of 32": Scheme(weight=tiled(int4_weight(64, 256, 32, BF16)), numbers="u8"),
    "int8": Scheme(weight=tiled(int8_weight(64, 256, 256, BF16)), numbers="i8"),
    "int8 in groups": Scheme(weight=tiled(int8_weight(64, 256, 128, BF16, has_zeros=True)), numbers="i8"),
    "fp8": Scheme(weight=tiled(fp8_weight(64, 256, None, BF16)), numbers="fp8e4nv"),
    "fp8 in blocks": Scheme(weight=tiled(fp8_weight(256, 256, (128, 128), BF16)), numbers="fp8e4nv"),
    "int8, inputs too": Scheme(weight=tiled(int8_weight(64, 256, 256, BF16)), numbers="i8", inputs="i8"),
    "fp8, inputs too": Scheme(
        weight=tiled(fp8_weight(64, 256, None, BF16)), numbers="fp8e4nv", inputs="fp8e4nv"
    ),
    "fp8 in blocks, inputs too": Scheme(
        weight=tiled(fp8_weight(256, 256, (128, 128), BF16)), numbers="fp8e4nv", inputs="fp8e4nv"
    ),
}


def tiles_of(name: str, tokens: int, target: GPUTarget, dtype: str = "bf16") -> LinearTiles:
    return linear_tiles(
        tokens,
        TORCH_DTYPES[dtype],
        widens_groups=SCHEMES[name].inputs is None and SCHEMES[name].weight.widens_groups,
        has_wide_products=target in (H100, B200),
    )


def compile_scheme(
    kernel: Any, name: str, dtype: str, target: GPUTarget, tiles: LinearTiles | None, **constants: Any
) -> Any:
    """Compile a kernel for a weight of the scheme as it is launched on the GPU."""
    scheme = SCHEMES[name]
    as_bits = target == A100  # It does not convert e4m3.
    numbers, inputs = (
        "u8" if as_bits and kind == "fp8e4nv" else kind for kind in (scheme.numbers, scheme.inputs)
    )
    if kernel is not quantised_linear_kernel:
        inputs = None
    return compile_kernel(
        kernel,
        dtype,
        {"TYPE": TYPES[dtype if inputs in (None, "u8") else inputs], **constants, **form_of(scheme.weight)},
        target,
        pointers={
            "x_ptr": inputs or dtype,
            "numbers_ptr": numbers,
            "zero_ptr": "i8" if numbers == "i8" else "u8",
        },
        multiples=("num_outputs", "num_inputs"),
        num_warps=DEQUANTISE_WARPS if tiles is None else tiles.warps,
        **({} if tiles is None else {"num_stages": tiles.stages}),
    )


def compile_product(name: str, tokens: int, target: GPUTarget = H100, dtype: str = "bf16") -> Any:
    """Compile the product with a number of tokens."""
    tiles = tiles_of(name, tokens, target, dtype)
    constants = {"X_SCALES": SCHEMES[name].x_scales, "HAS_BIAS": False}
    constants |= {"BLOCK_O": tiles.outputs, "BLOCK_T": tiles.tokens}
    return compile_scheme(quantised_linear_kernel, name, dtype, target, tiles, **constants)


def compile_dequantise(name: str, target: GPUTarget) -> Any:
    """Compile what writes a weight out in bf16."""
    return compile_scheme(dequantise_kernel, name, "bf16", target, None, BLOCK_O=DEQUANTISED_OUTPUTS)


def compile_experts(
    name: str, tokens: int, target: GPUTarget = H100, dtype: str = "bf16", *, is_ordered: bool = False
) -> Any:
    """Compile the product of quantised experts with the tiles for so many tokens."""
    rows = expert_tiles(tokens, dtype=TORCH_DTYPES[dtype]).rows
    tiles = tiles_of(name, rows, target, dtype)
    constants = {"PAIRS_A_ROW": 8, "ORDERED": is_ordered, "BLOCK_O": tiles.outputs, "BLOCK_T": rows}
    return compile_scheme(quantised_experts_kernel, name, dtype, target, tiles, **constants)


def products(*, is_quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield the products that the docs show, by their names there. A quick run compiles a few."""
    if is_quick:
        chosen = [("int4", FEW, H100), ("int4", MANY, H100), ("int4", FEW, CONSUMER)]
        chosen += [("fp8 in blocks, inputs too", MANY, H100)]
    else:
        chosen = [(name, tokens, H100) for name in SCHEMES for tokens in (FEW, SOME, MANY)]
        chosen += [("int4", tokens, target) for target in ELSEWHERE for tokens in (FEW, SOME, MANY)]
    for name, tokens, target in chosen:
        where = "" if target == H100 else f", {NAMES[target]}"
        upper = tiles_of(name, tokens, target).tokens
        yield f"{name}, {upper} tokens{where}, bf16", compile_product(name, tokens, target)
    for name in PLAINEST[:1] if is_quick else PLAINEST:
        for tokens in EXPERT_TOKENS[:1] if is_quick else EXPERT_TOKENS:
            rows = expert_tiles(tokens, dtype=BF16).rows
            yield f"experts in {name}, {rows} pairs, bf16", compile_experts(name, tokens)


def further_products() -> Iterator[tuple[str, Any]]:
    """Yield products that are checked, and not in the docs."""
    for target in ELSEWHERE:
        for name, scheme in SCHEMES.items():
            if target != A100 or scheme.inputs != "fp8e4nv":  # An A100 multiplies no e4m3.
                yield f"{name}, many tokens, {NAMES[target]}", compile_product(name, MANY, target)
    for name in PLAINEST:
        yield f"{name}, few tokens, fp16", compile_product(name, FEW, dtype="fp16")
    for target in (H100, *ELSEWHERE):
        for name in (name for name, scheme in SCHEMES.items() if scheme.inputs is None):
            for tokens in EXPERT_TOKENS:
                kernel = compile_experts(name, tokens, target)
                yield f"experts in {name}, {tokens} tokens, {NAMES[target]}", kernel
    yield "experts in int4, act order", compile_experts("int4", FEW, is_ordered=True)
    yield "experts in int4, fp16", compile_experts("int4", FEW, dtype="fp16")


def others(*, is_quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield products in fp32, which need not be fast, and the kernels around a product.

    Those round inputs by tokens or by units, and add parts.
    """
    for name in () if is_quick else PLAINEST:
        yield f"{name}, few tokens, fp32", compile_product(name, FEW, dtype="fp32")
        yield f"experts in {name}, fp32", compile_experts(name, FEW, dtype="fp32")
    for number in ("i8", "fp8e4nv"):
        for unit, units in ((4096, 1), (128, 16)):
            yield (
                f"inputs to {number} by {unit}",
                compile_kernel(
                    quantise_inputs_kernel,
                    "bf16",
                    {"UNIT": unit, "UNIT_POW2": unit, "BLOCK_R": units},
                    pointers={"numbers_ptr": number},
                    multiples=("num_inputs",),
                    num_warps=warps_of(unit),
                ),
            )
    for name, target in ((name, target) for name in SCHEMES for target in (H100, A100)):
        yield f"plain weight from {name}, {NAMES[target]}", compile_dequantise(name, target)
    yield (
        "sum of parts",
        compile_kernel(
            sum_parts_kernel, "bf16", {"HAS_BIAS": True, "TILE": SUM_TILE}, multiples=("num_outputs",)
        ),
    )


def checked(name: str, kernel: Any) -> str:
    """Return the row of a product. Raises AssertionError for one that spills, loads nothing ahead or needs too much."""
    facts = facts_of(kernel)
    row = facts.row(name)
    assert facts.shared_bytes <= LIMITS[kernel.metadata.target], row
    assert facts.loop, row
    assert not facts.loop_spills, row
    assert facts.tiles_in_flight, row
    return row


def main(*, is_quick: bool) -> list[str]:
    """Compile, check and print all kernels. Return the rows of products, which the docs show."""
    shown = []
    for name, kernel in products(is_quick=is_quick):
        shown.append(checked(name, kernel))
        print(shown[-1], flush=True)
    if not is_quick:
        for name, kernel in further_products():
            print(checked(name, kernel), flush=True)
    for name, kernel in others(is_quick=is_quick):
        print(facts_of(kernel).row(name))
    return shown


if __name__ == "__main__":
    rows = main(is_quick=sys.argv[1:] == ["--quick"])
    if sys.argv[1:] == ["--write"]:
        write(rows, Path("bench/reports/compiled-kernels.md"), LINEAR_HEADS)
