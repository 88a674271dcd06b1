"""Linear layers in fp32 or bf16 on a CPU with AVX-512 or AVX2: how a weight is laid out, and the call into
native/linear.cpp.

A token's result is the same whatever else is in the step. Its products are added in one order: 128 inputs by
themselves, then those sums. This order also keeps rounding small. Must never import triton.

Shapes: T tokens, I input size, O output size, U = O / 16 groups.
"""

import torch
from blockyard.kernels.cpu.checks import need
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.kernels.cpu.native_linear import LANES, run_linear
from blockyard.kernels.torch.huge_pages import advise_empty

PANEL = 64
"""Outputs that are computed together. Zeros in memory behind a weight's last group complete its last panel."""


def can_lay_out(library: CpuLibrary, weight_OI: torch.Tensor) -> bool:
    """Return whether the kernel takes such a weight, and nothing else on this machine is faster."""
    outputs, inputs = weight_OI.shape
    return (
        weight_OI.is_cpu
        and weight_OI.dtype in (torch.float32, torch.bfloat16)
        and library.has_linear(is_bf16=weight_OI.dtype == torch.bfloat16)
        and outputs % LANES == 0
        and inputs % 2 == 0
    )


def lay_out(weight_OI: torch.Tensor) -> torch.Tensor:
    """Copy a weight to [U, I, 16] in fp32 or [U, I / 2, 16, 2] in bf16. Requires whole groups and even inputs."""
    outputs, inputs = weight_OI.shape
    together = _inputs_together(weight_OI)
    in_panels = whole_panels(outputs // LANES)
    groups = torch.empty(in_panels, inputs // together, LANES, together, dtype=weight_OI.dtype)
    advise_empty(groups)
    groups[outputs // LANES :] = 0
    groups = groups[: outputs // LANES]
    for group, weight_16I in zip(groups, weight_OI.split(LANES), strict=True):
        group.copy_(weight_16I.unflatten(1, (-1, together)).transpose(0, 1))
    return groups if together > 1 else groups.squeeze(-1)


def panel_linear(
    library: CpuLibrary, x_TI: torch.Tensor, groups: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """Return x @ weight^T + bias, for a weight from `lay_out`."""
    together = _inputs_together(groups)
    need(library.has_linear(is_bf16=False), "a weight laid out for vector units that this CPU has not")
    need(
        groups.shape[2:] == ((LANES, together) if together > 1 else (LANES,))
        and groups.shape[1] * together == x_TI.shape[1]
        and groups.dtype == x_TI.dtype
        and groups.untyped_storage().nbytes()
        >= (groups.storage_offset() + whole_panels(groups.shape[0]) * groups.stride(0)) * groups.itemsize,
        "a weight {} in {} for {} inputs in {}",
        groups.shape,
        groups.dtype,
        x_TI.shape[1],
        x_TI.dtype,
    )
    return run_linear(library.linear, x_TI, groups, bias_O, groups.shape[0] * LANES)


def _inputs_together(weight: torch.Tensor) -> int:
    """Return how many inputs of one output lie side by side: as many as fill 32 bits."""
    return 4 // weight.itemsize


def whole_panels(groups: int) -> int:
    """Return the number of groups, rounded up to whole panels."""
    return -(-groups * LANES // PANEL) * PANEL // LANES
