"""Host side of the C++ operations on rows: norms, activations and scaling, with checks of shapes and types.

Does not choose between C++ and PyTorch (backend.py). Must never import triton.

Shapes: T tokens, H hidden size, I intermediate size.
"""

import torch
from blockyard.kernels.cpu.checks import need
from blockyard.kernels.cpu.library import CpuLibrary, Norm, Scaling, SiluMul

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def is_native(*tensors: torch.Tensor) -> bool:
    """Return whether the tensors are fp32 or bf16 on the CPU, all of one type, with dense rows."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.stride(-1) != 1 or not tensor.is_cpu:
            return False
    return dtype in NATIVE_DTYPES


def normalise(
    library: CpuLibrary,
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor | None,
    weight_H: torch.Tensor,
    eps: float,
    out_TH: torch.Tensor,
    *,
    adds_after: bool = False,
) -> None:
    """Compute `Backend.rms_norm`, with a residual `add_rms_norm`, and with `adds_after` `rms_norm_add`."""
    num_rows, hidden = x_TH.shape
    need(weight_H.shape == (hidden,), "a norm of {} for {}", weight_H.shape, hidden)
    need(
        weight_H.dtype in (x_TH.dtype, torch.float32) and weight_H.is_contiguous() and weight_H.is_cpu,
        "a norm of {} for {}",
        weight_H.dtype,
        x_TH.dtype,
    )
    need(out_TH.shape == x_TH.shape, "an output of another shape")
    need(residual_TH is None or residual_TH.shape == x_TH.shape, "a residual of another shape")
    work = Norm(
        x=x_TH.data_ptr(),
        residual=None if residual_TH is None else residual_TH.data_ptr(),
        weight=weight_H.data_ptr(),
        out=out_TH.data_ptr(),
        x_stride=x_TH.stride(0),
        residual_stride=0 if residual_TH is None else residual_TH.stride(0),
        out_stride=out_TH.stride(0),
        num_rows=num_rows,
        hidden=hidden,
        weight_is_fp32=weight_H.dtype == torch.float32,
        adds_after=adds_after,
        eps=eps,
    )
    library.normalise(x_TH.dtype == torch.bfloat16, torch.get_num_threads(), work)


def activate(library: CpuLibrary, gate_up_T2I: torch.Tensor, out_TI: torch.Tensor, *, is_gelu: bool) -> None:
    """Compute `Backend.silu_mul` or `Backend.gelu_mul`."""
    num_rows, width = out_TI.shape
    need(gate_up_T2I.shape == (num_rows, 2 * width), "gate and up {} for {}", gate_up_T2I.shape, width)
    work = SiluMul(
        gate_up=gate_up_T2I.data_ptr(),
        out=out_TI.data_ptr(),
        gate_up_stride=gate_up_T2I.stride(0),
        out_stride=out_TI.stride(0),
        num_rows=num_rows,
        width=width,
        is_gelu=is_gelu,
    )
    library.silu_mul(gate_up_T2I.dtype == torch.bfloat16, torch.get_num_threads(), work)


def scale(library: CpuLibrary, x_TH: torch.Tensor, factor: float) -> None:
    """Compute `Backend.scale`."""
    num_rows, width = x_TH.shape
    work = Scaling(x=x_TH.data_ptr(), stride=x_TH.stride(0), num_rows=num_rows, width=width, factor=factor)
    library.scale(x_TH.dtype == torch.bfloat16, torch.get_num_threads(), work)
