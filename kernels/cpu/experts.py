"""Experts on a CPU in one call of native/experts.cpp: how their weights are stacked, and the call.

Owns the check of everything before its addresses leave Python, and the memory of the call, which has the same size for
any choice of experts. So a call can be recorded. Must never import triton.

Shapes: T tokens, K experts a token, E experts, H hidden size, I intermediate size, R rows of one expert at once.
"""

from collections.abc import Callable

import torch
from blockyard.kernels.cpu.checks import need
from blockyard.kernels.cpu.int8_linear import can_quantise, quantise
from blockyard.kernels.cpu.library import CpuLibrary, Experts
from blockyard.kernels.cpu.native_linear import LANES
from blockyard.kernels.cpu.panel_linear import can_lay_out, lay_out, whole_panels
from blockyard.kernels.interface import Stacked
from blockyard.kernels.torch.huge_pages import advise_empty

MOST_ROWS = 256
"""Rows of one expert at once: as many as a linear takes."""
_INT8_TAIL_LINES = 2


def stack_experts(library: CpuLibrary, weight_EOI: Stacked, *, in_int8: bool) -> torch.Tensor | None:
    """Return the weights of all experts in one tensor, each as a linear of the library reads it, or None where it reads
    no such weights."""
    groups = weight_EOI[0].shape[0] // LANES
    if in_int8 and can_quantise(weight_EOI[0]):
        return _stack(quantise, weight_EOI, padding=0)
    if can_lay_out(library, weight_EOI[0]):
        return _stack(lay_out, weight_EOI, padding=whole_panels(groups) - groups)
    return None


def _stack(pack: Callable[[torch.Tensor], torch.Tensor], weight_EOI: Stacked, padding: int) -> torch.Tensor:
    """Return what `pack` makes of each weight, each followed by so many groups of zeros."""
    first = pack(weight_EOI[0])
    stacked = torch.empty(len(weight_EOI), len(first) + padding, *first.shape[1:], dtype=first.dtype)
    advise_empty(stacked)
    stacked[:, len(first) :] = 0
    for expert, weight_OI in enumerate(weight_EOI):
        stacked[expert, : len(first)] = pack(weight_OI) if expert else first
    return stacked[:, : len(first)]


def are_stacked(*weights: Stacked) -> bool:
    """Return whether all weights come from `stack_experts`."""
    return all(isinstance(w, torch.Tensor) and (w.dim() > 3 or w.dtype == torch.int8) for w in weights)


def native_experts(
    library: CpuLibrary,
    x_TH: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up: Stacked,
    down: Stacked,
    *,
    top_k: int,
    normalizes: bool,
) -> torch.Tensor:
    """Compute `Backend.experts` for weights from `stack_experts`."""
    assert isinstance(gate_up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    num_tokens, hidden = x_TH.shape
    width, num_experts = _num_inputs(down), len(down)
    _check(x_TH, logits_TE, gate_up, down, top_k)
    rows = min(num_tokens, MOST_ROWS)
    out_TH = x_TH.new_empty(num_tokens, hidden)
    pairs = torch.empty(2, num_tokens, top_k, dtype=torch.int32)
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32)
    rows_RH, expert_out_RH = x_TH.new_empty(rows, hidden), x_TH.new_empty(rows, hidden)
    gate_up_R2I, inner_RI = x_TH.new_empty(rows, 2 * width), x_TH.new_empty(rows, width)
    sums_TH = torch.empty(num_tokens, hidden, dtype=torch.float32)
    work = Experts(
        x=x_TH.data_ptr(),
        logits=logits_TE.data_ptr(),
        gate_up=gate_up.data_ptr(),
        down=down.data_ptr(),
        out=out_TH.data_ptr(),
        pairs=pairs.data_ptr(),
        weights=weights_TK.data_ptr(),
        rows=rows_RH.data_ptr(),
        gate_up_rows=gate_up_R2I.data_ptr(),
        inner=inner_RI.data_ptr(),
        expert_out=expert_out_RH.data_ptr(),
        sums=sums_TH.data_ptr(),
        x_stride=x_TH.stride(0),
        logits_stride=logits_TE.stride(0),
        gate_up_bytes=gate_up.stride(0) * gate_up.itemsize,
        down_bytes=down.stride(0) * down.itemsize,
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        width=width,
        most_rows=rows,
        normalizes=normalizes,
        is_int8=gate_up.dtype == torch.int8,
    )
    library.experts(x_TH.dtype == torch.bfloat16, torch.get_num_threads(), work)
    return out_TH


def _check(
    x_TH: torch.Tensor, logits_TE: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top_k: int
) -> None:
    """Raise ValueError for tensors that do not fit."""
    num_tokens, hidden = x_TH.shape
    width, num_experts = _num_inputs(down), len(down)
    need(
        x_TH.dtype == logits_TE.dtype and x_TH.stride(1) == logits_TE.stride(1) == 1 and x_TH.is_cpu,
        "inputs of {} and logits of {}, or not in rows",
        x_TH.dtype,
        logits_TE.dtype,
    )
    need(
        len(gate_up) == num_experts
        and logits_TE.shape == (num_tokens, num_experts)
        and 1 <= top_k <= num_experts,
        "{} experts of {} for logits {}",
        top_k,
        num_experts,
        logits_TE.shape,
    )
    need(
        (_num_inputs(gate_up), gate_up.shape[1] * LANES) == (hidden, 2 * width)
        and down.shape[1] * LANES == hidden
        and gate_up.dtype == down.dtype
        and gate_up.dtype in (torch.int8, x_TH.dtype)
        and gate_up[0].is_contiguous()
        and down[0].is_contiguous(),
        "experts {} and {} for inputs {}",
        gate_up.shape,
        down.shape,
        x_TH.shape,
    )


def _num_inputs(stacked: torch.Tensor) -> int:
    """Return the inputs of each expert's weight, laid out as panel_linear.py or int8_linear.py does."""
    if stacked.dtype == torch.int8:
        return (stacked.shape[2] - _INT8_TAIL_LINES) * 4
    return stacked.shape[2] * (4 // stacked.itemsize)
