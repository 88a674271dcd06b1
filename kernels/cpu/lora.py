"""The call of native/lora.cpp, which adds the adapters of a linear layer.

Owns the checks of tensors before their addresses leave Python. The C++ checks the indices of a plan itself, because a
recorded step reads other indices at each replay. Must never import triton.

Shapes: as in kernels/lora.py.
"""

import torch
from blockyard.kernels.cpu.checks import need
from blockyard.kernels.cpu.library import CpuLibrary, Lora
from blockyard.kernels.lora import LoraLinear, LoraPlan


def add_lora(
    library: CpuLibrary, out_TO: torch.Tensor, x_TI: torch.Tensor, weights: LoraLinear, plan: LoraPlan
) -> None:
    """Add the adapters' part to a layer's output. Raises ValueError for tensors that do not fit one another."""
    num_slots, num_parts, max_rank, num_inputs = weights.a_SPRI.shape
    num_outputs = weights.b_SRO.shape[2]
    num_tokens = len(plan.tokens_M)
    if not num_tokens:
        return
    need(
        x_TI.shape[1] == num_inputs and out_TO.shape == (len(x_TI), num_outputs),
        "adapters of {} inputs and {} outputs for {} and {}",
        num_inputs,
        num_outputs,
        x_TI.shape,
        out_TO.shape,
    )
    need(x_TI.stride(1) == out_TO.stride(1) == 1, "inputs or outputs not in rows")
    need(
        weights.b_SRO.shape[:2] == (num_slots, max_rank)
        and weights.ranks_S.shape == (num_slots,)
        and weights.starts_P1.shape == (num_parts + 1,)
        and sum(weights.widths) == num_outputs,
        "slots of different sizes",
    )
    for tensor in (weights.a_SPRI, weights.b_SRO, out_TO):
        need(
            tensor.dtype == x_TI.dtype and tensor.is_cpu, "an adapter of {} for {}", tensor.dtype, x_TI.dtype
        )
    for tensor in (weights.ranks_S, weights.starts_P1, plan.tokens_M, plan.items_W3):
        need(tensor.dtype == torch.int32 and tensor.is_cpu, "indices of {}", tensor.dtype)
    for tensor in (weights.a_SPRI, weights.b_SRO, weights.ranks_S, weights.starts_P1):
        need(tensor.is_contiguous(), "slots in pieces")
    need(plan.tokens_M.is_contiguous() and plan.items_W3.is_contiguous(), "a plan in pieces")
    between_MPR = torch.empty(num_tokens, num_parts, max_rank, dtype=torch.float32)
    work = Lora(
        x=x_TI.data_ptr(),
        out=out_TO.data_ptr(),
        a=weights.a_SPRI.data_ptr(),
        b=weights.b_SRO.data_ptr(),
        ranks=weights.ranks_S.data_ptr(),
        starts=weights.starts_P1.data_ptr(),
        tokens=plan.tokens_M.data_ptr(),
        items=plan.items_W3.data_ptr(),
        between=between_MPR.data_ptr(),
        x_stride=x_TI.stride(0),
        out_stride=out_TO.stride(0),
        num_rows=len(x_TI),
        num_tokens=num_tokens,
        num_items=len(plan.items_W3),
        num_slots=num_slots,
        num_parts=num_parts,
        max_rank=max_rank,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
    )
    library.add_lora(x_TI.dtype == torch.bfloat16, torch.get_num_threads(), work)
