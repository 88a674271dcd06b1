"""Checks before an address leaves Python for the C++ kernels, which would read and write wherever it points.

Owns the checks of types, sizes, strides and of every index of a plan. All raise ValueError, because assertions may be
switched off. What is the same for all layers is checked once a plan.

Shapes: as in backend.py.
"""

from typing import Self

import numpy as np
import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.interface import HeadNorms
from blockyard.kernels.kv_pool import head_dim_of, is_quantised


class PlanChecks:
    """Remembers the last valid plan of each window, so that the layers of one step check its indices once."""

    def __init__(self) -> None:
        self._sound: dict[int | None, tuple[AttentionPlan, int, int | None]] = {}
        self._seen: list[tuple[AttentionPlan, int, int | None]] | None = None

    def check(self, plan: AttentionPlan, num_blocks: int, num_positions: int | None = None) -> None:
        """Check a plan for a pool of so many blocks, and a rotary table of so many positions if it is read."""
        known = self._sound.get(plan.window, (None, 0, None))
        if known[0] is plan and known[1] == num_blocks and num_positions in (None, known[2]):
            return
        _check_indices(plan, num_blocks, num_positions)
        self._sound[plan.window] = (plan, num_blocks, num_positions)
        if self._seen is not None:
            self._seen.append(self._sound[plan.window])

    @classmethod
    def keeping(cls) -> Self:
        """Return checks that keep every plan they have checked, for `check_again`."""
        checks = cls()
        checks._seen = []
        return checks

    def check_again(self) -> None:
        """Repeat all checks that have passed, because the plans' tensors may hold another step."""
        for plan, num_blocks, num_positions in self._seen or ():
            _check_indices(plan, num_blocks, num_positions)


def need(holds: bool, what: str, *values: object) -> None:
    """Raise ValueError unless `holds`. `what` has a {} for each value, and is formatted only on failure: a step runs
    some hundred checks."""
    if not holds:
        raise ValueError(what.format(*values))


def check_pool(kv_pool_B2KPD: torch.Tensor, heads_TKD: torch.Tensor, plan: AttentionPlan) -> None:
    _, num_kv_heads, head_dim = heads_TKD.shape
    held = (*kv_pool_B2KPD.shape[1:4], head_dim_of(kv_pool_B2KPD))
    need(
        held == (2, num_kv_heads, plan.block_size, head_dim),
        "a pool of shape {} does not hold {} kv heads of size {} in blocks of {}",
        kv_pool_B2KPD.shape,
        num_kv_heads,
        head_dim,
        plan.block_size,
    )
    need(_on_cpu(kv_pool_B2KPD) and kv_pool_B2KPD.is_contiguous(), "the pool is not one piece of this memory")


def check_heads(kv_pool_B2KPD: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Check that tensors have the pool's type, or one common type beside a quantised pool, and dense heads of each
    token."""
    dtype = tensors[0].dtype if is_quantised(kv_pool_B2KPD) else kv_pool_B2KPD.dtype
    head_dim = head_dim_of(kv_pool_B2KPD)
    for tensor in tensors:
        need(
            tensor.dtype == dtype and tensor.shape[2] == head_dim and tensor.stride()[1:] == (head_dim, 1),
            "heads {} {}, or not in dense rows, beside a pool of {}",
            tensor.shape,
            tensor.dtype,
            dtype,
        )
        need(_on_cpu(tensor), "heads in another memory")


def check_norms(norms: HeadNorms, heads_TKD: torch.Tensor) -> None:
    for weight_D in (norms.q_weight_D, norms.k_weight_D):
        need(
            weight_D.dtype in (heads_TKD.dtype, torch.float32)
            and weight_D.dtype == norms.q_weight_D.dtype
            and weight_D.shape == heads_TKD.shape[2:]
            and _is_dense(weight_D),
            "a norm of {} {} for heads {} {}",
            weight_D.shape,
            weight_D.dtype,
            heads_TKD.shape,
            heads_TKD.dtype,
        )


def check_rotary_table(cos_sin_SD: torch.Tensor, head_dim: int) -> None:
    need(
        cos_sin_SD.dtype == torch.float32 and _is_dense(cos_sin_SD) and cos_sin_SD.shape[1:] == (head_dim,),
        "a rotary table {} {} for heads of {}",
        cos_sin_SD.shape,
        cos_sin_SD.dtype,
        head_dim,
    )


def check_nuclei(
    weights_FV: torch.Tensor,
    top_k_F: torch.Tensor,
    top_p_F: torch.Tensor,
    pending_F: torch.Tensor,
    threshold_F: torch.Tensor,
) -> None:
    need(
        weights_FV.dim() == 2
        and weights_FV.dtype == torch.float32
        and _on_cpu(weights_FV)
        and weights_FV.shape[1] > 0
        and weights_FV.stride(1) == 1,
        "weights {} {}",
        weights_FV.shape,
        weights_FV.dtype,
    )
    vectors = (
        (top_k_F, torch.int64),
        (top_p_F, torch.float64),
        (pending_F, torch.bool),
        (threshold_F, torch.float32),
    )
    for vector, dtype in vectors:
        need(
            vector.dtype == dtype and vector.shape == weights_FV.shape[:1] and _is_dense(vector),
            "a vector of {} {} for weights {}",
            vector.shape,
            vector.dtype,
            weights_FV.shape,
        )
    need(bool((top_k_F > 0).all()), "a top-k of less than 1")


def _check_indices(plan: AttentionPlan, num_blocks: int, num_positions: int | None) -> None:
    """Check every index of a plan, in numpy: its calls cost less than PyTorch's and do not become part of a recorded
    step."""
    tensors = (
        (plan.query_starts_R1, torch.int32),
        (plan.context_lens_R, torch.int32),
        (plan.block_table_RB, torch.int32),
        (plan.slot_mapping_T, torch.int64),
        (plan.positions_T, torch.int64),
    )
    for tensor, dtype in tensors:
        need(tensor.dtype == dtype and _is_dense(tensor), "a plan's tensor is of another type or memory")
    starts_R1, context_R, table_RB, slots_T, positions_T = (tensor.numpy() for tensor, _ in tensors)
    need(
        len(starts_R1) == plan.num_rows + 1
        and len(context_R) == len(table_RB) == plan.num_rows
        and len(positions_T) == len(slots_T) >= plan.num_query_tokens,
        "a plan's tensors are of different steps",
    )
    query_lens_R = np.diff(starts_R1)
    need(
        bool((query_lens_R >= 1).all() and (context_R >= query_lens_R).all()),
        "a context shorter than its queries",
    )
    if len(slots_T):
        need(int(slots_T.max()) < num_blocks * plan.block_size, "a slot beyond {} blocks", num_blocks)
        need(int(positions_T.min()) >= 0, "a position before the first")
        if num_positions is not None:
            needed = int(positions_T.max()) + 1
            need(needed <= num_positions, "{} positions, and a rotary table of {}", needed, num_positions)
    # Entries beyond a row's own blocks are arbitrary and never read.
    num_blocks_R1 = -(-context_R[:, None] // plan.block_size)
    width = int(num_blocks_R1.max(initial=0))
    need(width <= table_RB.shape[1], "a table shorter than its context")
    read_RB = table_RB[:, :width]
    strays_RB = (read_RB < 0) | (read_RB >= num_blocks)
    strays_RB &= np.arange(width) < num_blocks_R1
    need(not strays_RB.any(), "a block beyond the pool's {}", num_blocks)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and _on_cpu(tensor)


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu
