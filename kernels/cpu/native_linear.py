"""The call of a linear of native/, for every kind of weight.

Owns the checks before its addresses leave Python. Does not own a weight's layout (panel_linear.py, int8_linear.py,
grouped_linear.py).
Must never import triton.

Shapes: T tokens, I input size, O output size.
"""

import ctypes
from collections.abc import Callable

import torch
from blockyard.kernels.cpu.checks import need
from blockyard.kernels.cpu.library import Linear

LANES = 16
"""Outputs of a group. Weights are laid out group by group."""


def run_linear(
    function: Callable[..., None],
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    bias_O: torch.Tensor | None,
    num_outputs: int,
    extended: Callable[[Linear], ctypes.Structure] = lambda linear: linear,
) -> torch.Tensor:
    """Return x @ weight^T + bias [T, O], computed by `function`, a linear of the library. `extended` makes the struct
    that it works on. Raises ValueError if weight and inputs do not fit."""
    need(weight.is_contiguous() and weight.is_cpu, "a weight in pieces, or in another memory")
    need(
        x_TI.dtype in (torch.float32, torch.bfloat16) and x_TI.stride(1) == 1 and x_TI.is_cpu,
        "inputs of {}, not in rows, or in another memory",
        x_TI.dtype,
    )
    need(
        bias_O is None
        or (
            bias_O.dtype == x_TI.dtype
            and bias_O.shape == (num_outputs,)
            and bias_O.is_contiguous()
            and bias_O.is_cpu
        ),
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
    function(x_TI.dtype == torch.bfloat16, torch.get_num_threads(), extended(work))
    return out_TO
