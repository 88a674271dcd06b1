"""Linear layers in fp32 or bf16 on a CPU with AVX-512: how a weight is laid out, and the call into `native/linear.cpp`.

A token's result is the same whatever else is in the step: its products are added in the order of the inputs. Must never
import triton.

Shapes: T tokens, I input size, O output size, U = O / 16 groups.
"""

from collections.abc import Callable

import torch
from blockyard.kernels.cpu_checks import need
from blockyard.kernels.cpu_library import CpuLibrary, Linear
from blockyard.kernels.huge_pages import advise_empty
from blockyard.kernels.packed_linear import MIN_PACKED_NUMEL

LANES = 16
PANEL = 64
"""Outputs that are computed together."""


def can_lay_out(library: CpuLibrary, weight_OI: torch.Tensor) -> bool:
    """Whether it is the fastest way on this machine, too."""
    outputs, inputs = weight_OI.shape
    return (
        weight_OI.dtype in (torch.float32, torch.bfloat16)
        and library.has_linear(is_bf16=weight_OI.dtype == torch.bfloat16)
        and outputs % PANEL == 0
        and inputs % 2 == 0
        and weight_OI.numel() >= MIN_PACKED_NUMEL
    )


def lay_out(weight_OI: torch.Tensor) -> torch.Tensor:
    """A copy: [U, I, 16] in fp32, [U, I / 2, 16, 2] in bf16. Only where `can_lay_out`."""
    outputs, inputs = weight_OI.shape
    together = 4 // weight_OI.itemsize
    groups = torch.empty(outputs // LANES, inputs // together, LANES, together, dtype=weight_OI.dtype)
    advise_empty(groups)
    for group, weight_16I in zip(groups, weight_OI.split(LANES), strict=True):
        group.copy_(weight_16I.unflatten(1, (-1, together)).transpose(0, 1))
    return groups if together > 1 else groups.squeeze(-1)


def panel_linear(
    library: CpuLibrary, x_TI: torch.Tensor, groups: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight^T + bias, for a weight from `lay_out`."""
    num_inputs = x_TI.shape[1]
    shape = (num_inputs, LANES) if groups.itemsize == 4 else (num_inputs // 2, LANES, 2)
    need(
        groups.shape[1:] == shape and groups.dtype == x_TI.dtype,
        "a weight {} in {} for {} inputs in {}",
        groups.shape,
        groups.dtype,
        num_inputs,
        x_TI.dtype,
    )
    return run_linear(library.linear, x_TI, groups, bias_O, groups.shape[0] * LANES)


def run_linear(
    function: Callable[..., None],
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    bias_O: torch.Tensor | None,
    num_outputs: int,
) -> torch.Tensor:
    """[T, O] by a linear of the library, for a weight that fits the inputs. Raises ValueError for the rest."""
    need(weight.is_contiguous(), "a weight in pieces")
    need(
        x_TI.dtype in (torch.float32, torch.bfloat16) and x_TI.stride(1) == 1,
        "inputs of {}, or not in rows",
        x_TI.dtype,
    )
    need(
        bias_O is None
        or (bias_O.dtype == x_TI.dtype and bias_O.shape == (num_outputs,) and bias_O.is_contiguous()),
        "a bias that is not {} of {}",
        num_outputs,
        x_TI.dtype,
    )
    num_rows, num_inputs = x_TI.shape
    out_TO = x_TI.new_empty(num_rows, num_outputs)
    work = Linear(
        x=x_TI.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        out=out_TO.data_ptr(),
        x_stride=x_TI.stride(0),
        out_stride=num_outputs,
        num_rows=num_rows,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
    )
    function(x_TI.dtype == torch.bfloat16, torch.get_num_threads(), work)
    return out_TO
