"""Experts on a CPU in one call of native/experts.cpp: how their weights are stacked, and the call.

Owns the checks before any address leaves Python, and the memory of the call. That has the same size for any choice of
experts, so a call can be recorded. Must never import triton.

Shapes: T tokens, K experts a token, E experts, H hidden size, I intermediate size, R rows of one expert at once.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from blockyard.kernels.cpu.checks import need
from blockyard.kernels.cpu.grouped_linear import GroupedStack, can_group, group_stack
from blockyard.kernels.cpu.int8_linear import can_quantise, quantise
from blockyard.kernels.cpu.library import CpuLibrary, ExpertMatrix, Experts
from blockyard.kernels.cpu.native_linear import LANES
from blockyard.kernels.cpu.panel_linear import can_lay_out, lay_out, whole_panels
from blockyard.kernels.interface import Stacked
from blockyard.kernels.quantised import Int4Weight, Int8Weight, plain
from blockyard.kernels.torch.huge_pages import advise_empty

MOST_ROWS = 256
"""Rows of one expert at once: as many as a linear takes."""
_INT8_TAIL_LINES = 2


def stack_experts(
    library: CpuLibrary, weight_EOI: Stacked, *, in_int8: bool
) -> torch.Tensor | GroupedStack | None:
    """Return the weights of all experts in one tensor, each as a linear of the library reads it, or None where it reads
    no such weights. Those in FP8 are read as plain numbers."""
    if all(
        isinstance(weight, Int4Weight | Int8Weight) and can_group(library, weight) for weight in weight_EOI
    ):
        return group_stack(cast(Sequence[Int4Weight | Int8Weight], weight_EOI))
    first = plain(weight_EOI[0])
    groups = first.shape[0] // LANES
    if in_int8 and can_quantise(first):
        return _stack(quantise, weight_EOI, padding=0)
    if can_lay_out(library, first):
        return _stack(lay_out, weight_EOI, padding=whole_panels(groups) - groups)
    return None


def _stack(pack: Callable[[torch.Tensor], torch.Tensor], weight_EOI: Stacked, padding: int) -> torch.Tensor:
    """Return what `pack` makes of each weight, each followed by so many groups of zeros."""
    first = pack(plain(weight_EOI[0]))
    stacked = torch.empty(len(weight_EOI), len(first) + padding, *first.shape[1:], dtype=first.dtype)
    advise_empty(stacked)
    stacked[:, len(first) :] = 0
    for expert, weight_OI in enumerate(weight_EOI):
        stacked[expert, : len(first)] = pack(plain(weight_OI)) if expert else first
    return stacked[:, : len(first)]


def are_stacked(*weights: Stacked) -> bool:
    """Return whether all weights come from `stack_experts`."""
    return all(isinstance(w, GroupedStack) or (isinstance(w, torch.Tensor) and w.dim() > 3) for w in weights)


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
    assert isinstance(gate_up, torch.Tensor | GroupedStack)
    assert isinstance(down, torch.Tensor | GroupedStack)
    num_tokens, hidden = x_TH.shape
    width, num_experts = _sizes(down)[1], len(down)
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
        gate_up=_matrix(gate_up),
        down=_matrix(down),
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
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        width=width,
        most_rows=rows,
        normalizes=normalizes,
    )
    library.experts(x_TH.dtype == torch.bfloat16, torch.get_num_threads(), work)
    return out_TH


def _check(
    x_TH: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up: torch.Tensor | GroupedStack,
    down: torch.Tensor | GroupedStack,
    top_k: int,
) -> None:
    """Raise ValueError for tensors that do not fit."""
    num_tokens, hidden = x_TH.shape
    width, num_experts = _sizes(down)[1], len(down)
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
        _sizes(gate_up) == (2 * width, hidden)
        and _sizes(down) == (hidden, width)
        and all(_is_readable(stacked, x_TH.dtype) for stacked in (gate_up, down)),
        "experts {} and {} for inputs {}",
        _sizes(gate_up),
        _sizes(down),
        x_TH.shape,
    )


def _is_readable(stacked: torch.Tensor | GroupedStack, dtype: torch.dtype) -> bool:
    """Return whether each expert's weight is in one piece, and multiplies inputs of this type."""
    if isinstance(stacked, GroupedStack):
        return stacked.memory.is_contiguous() and (
            stacked.order_EI is None or stacked.order_EI.is_contiguous()
        )
    return stacked.dtype in (torch.int8, dtype) and stacked[0].is_contiguous()


def _matrix(stacked: torch.Tensor | GroupedStack) -> ExpertMatrix:
    """Return where the weights of all experts lie, and which linear reads them."""
    if isinstance(stacked, GroupedStack):
        memory, order_EI = stacked.memory, stacked.order_EI
        return ExpertMatrix(
            weight=memory.data_ptr(),
            order=None if order_EI is None else order_EI.data_ptr(),
            bytes=memory.stride(0),
            bits=stacked.bits,
            depth=stacked.depth,
        )
    is_int8 = stacked.dtype == torch.int8
    return ExpertMatrix(
        weight=stacked.data_ptr(), bytes=stacked.stride(0) * stacked.itemsize, bits=8 if is_int8 else 0
    )


def _sizes(stacked: torch.Tensor | GroupedStack) -> tuple[int, int]:
    """Return outputs and inputs of each expert's weight, laid out as panel_linear.py, int8_linear.py or
    grouped_linear.py does."""
    if isinstance(stacked, GroupedStack):
        return stacked.memory.shape[1] * LANES, stacked.num_inputs
    outputs = stacked.shape[1] * LANES
    if stacked.dtype == torch.int8:
        return outputs, (stacked.shape[2] - _INT8_TAIL_LINES) * 4
    return outputs, stacked.shape[2] * (4 // stacked.itemsize)
