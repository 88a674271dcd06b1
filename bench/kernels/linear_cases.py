"""Cases of linear layers: in the model's data type and, on a GPU, beside them with weights of 4 and 8 bits.

Bytes and FLOPs are counted as in cases.py. Scales and zero points count as bytes of the weight.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from blockyard.kernels.quantised import Fp8Weight, Int4Weight, Int8Weight, QuantisedWeight

from bench.kernels.case import Bench, Case

GROUP = 128
INT4 = "4 bits"
FORMS = (
    INT4,
    "int8",
    "fp8",
    "fp8 in blocks",
    "int8 and inputs",
    "fp8 and inputs",
    "fp8 in blocks and inputs",
)
"""Weights in 4 bits are in groups of 128 with zero points. Blocks are 128 x 128."""
AND_INPUTS = " and inputs"
QUANTISED_TOKENS = (1, 8, 64, 2048)


def linears(
    bench: Bench, model: str, tokens: int, name: str, outputs: int, inputs: int, *, with_quantised: bool
) -> Iterator[Case]:
    """Yield a linear, and in turns with it those with quantised weights, if wanted and served by kernels of ours."""
    plain = _linear(bench, model, tokens, name, outputs, inputs)
    if not with_quantised or bench.backend.name != "triton" or tokens not in QUANTISED_TOKENS:
        yield plain
        return
    turns = f"{model} {name} {tokens}"
    yield replace(plain, turns=turns)
    for form in FORMS:
        yield replace(_quantised(bench, plain, form, tokens, outputs, inputs), turns=turns)


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


def _quantised(bench: Bench, plain: Case, form: str, tokens: int, outputs: int, inputs: int) -> Case:
    """Return the case of the same linear with a weight of this form."""
    scheme = form.removesuffix(AND_INPUTS)

    def make() -> Callable[[], object]:
        from blockyard.kernels.triton.backend import TritonBackend

        backend = TritonBackend(quantises_inputs=form.endswith(AND_INPUTS))
        weight = backend.pack_linear(random_weight(bench, scheme, outputs, inputs))
        x = bench.random(tokens, inputs)
        return lambda: backend.linear(x, weight)

    item = bench.dtype.itemsize
    return replace(
        plain,
        kernel=f"{plain.kernel}, {form}",
        num_bytes=weight_bytes(scheme, outputs, inputs) + tokens * (inputs + outputs) * item,
        make=make,
    )


def weight_bytes(scheme: str, outputs: int, inputs: int) -> int:
    """Return the bytes of a weight with scales of 2 bytes, as checkpoints store them. Blocks have few scales."""
    if scheme == INT4:
        return outputs * inputs // 2 + outputs * inputs // GROUP * 5 // 2
    return outputs * inputs + (0 if scheme == "fp8 in blocks" else 2 * outputs)


def random_weight(bench: Bench, scheme: str, outputs: int, inputs: int) -> QuantisedWeight:
    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=bench.device) * 0.01

    def numbers(least: int, most: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randint(least, most, shape, device=bench.device, dtype=dtype)

    match scheme:
        case "4 bits":
            return Int4Weight(
                packed_OI=numbers(0, 256, torch.uint8, outputs, inputs // 2),
                scale_OG=scales(outputs, inputs // GROUP),
                zero_OG=numbers(0, 16, torch.uint8, outputs, inputs // GROUP),
                group_size=GROUP,
                order_I=None,
                dtype=bench.dtype,
            )
        case "int8":
            return Int8Weight(
                weight_OI=numbers(-127, 128, torch.int8, outputs, inputs),
                scale_OG=scales(outputs, 1),
                zero_OG=None,
                group_size=inputs,
                order_I=None,
                dtype=bench.dtype,
            )
    is_in_blocks = scheme == "fp8 in blocks"
    return Fp8Weight(
        weight_OI=torch.randn(outputs, inputs, device=bench.device).to(torch.float8_e4m3fn),
        scale=scales(-(-outputs // 128), -(-inputs // 128)) if is_in_blocks else scales(outputs),
        block_shape=(128, 128) if is_in_blocks else None,
        dtype=bench.dtype,
    )
