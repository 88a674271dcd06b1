"""Linear layers in int8 on a CPU: how a weight is quantised and laid out, and the call into native/int8.cpp.

Each output of a weight and each token of an activation has a scale of its own. It is the greatest magnitude over 127.
So a token's result does not depend on the other tokens of the step. Must never import triton.

Shapes: T tokens, I input size, O output size, U = O / 16 groups, Q = I / 4.
"""

import torch
from blockyard.kernels.cpu.checks import need
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.kernels.cpu.native_linear import LANES, run_linear
from blockyard.kernels.torch.huge_pages import advise_empty

LINE_BYTES = 64
_TAIL_LINES = 2  # 16 scales, 16 corrections


def can_quantise(weight_OI: torch.Tensor) -> bool:
    outputs, inputs = weight_OI.shape
    return weight_OI.dtype in (torch.float32, torch.bfloat16) and outputs % LANES == 0 and inputs % 4 == 0


def quantise(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the weight as [U, Q + 2, 64] in int8, as int8.cpp reads it. Requires `can_quantise`."""
    outputs, inputs = weight_OI.shape
    packed = torch.empty(outputs // LANES, inputs // 4 + _TAIL_LINES, LINE_BYTES, dtype=torch.int8)
    advise_empty(packed)
    for group, weight_16I in zip(packed, weight_OI.split(LANES), strict=True):
        scale_161 = weight_16I.float().abs().amax(dim=1, keepdim=True) / 127
        rounded = (weight_16I.float() / scale_161.clamp(min=torch.finfo(torch.float32).tiny)).round()
        values_16I = rounded.to(torch.int8)
        group[:-_TAIL_LINES] = values_16I.view(LANES, -1, 4).transpose(0, 1).flatten(1)
        group[-2] = scale_161.flatten().view(torch.int8)
        group[-1] = (values_16I.int().sum(dim=1, dtype=torch.int32) * 128).view(torch.int8)
    return packed


def int8_linear(
    library: CpuLibrary, x_TI: torch.Tensor, weight: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """Return x @ weight^T + bias, for a weight from `quantise`."""
    num_inputs = x_TI.shape[1]
    need(
        weight.shape[2:] == (LINE_BYTES,) and (weight.shape[1] - _TAIL_LINES) * 4 == num_inputs,
        "a weight {} in int8 for {} inputs",
        weight.shape,
        num_inputs,
    )
    return run_linear(library.int8_linear, x_TI, weight, bias_O, weight.shape[0] * LANES)
