"""Plans of decode steps in buffers that stay where they are, as a captured graph needs them: what it reads, and how
much of it, is decided at its capture.

A step of fewer rows is padded. A row of padding has no item, so that it reads no keys; its slot is PADDING_SLOT, so
that it writes none; what comes out of it means nothing. An item of padding has no query token, and its program ends at
once.

Shapes: R rows of the largest step, r rows of one size, n rows of a step, B blocks of the longest context, W items.
"""

from dataclasses import replace

import torch
from blockyard.kernels.attention_items import DEFAULT_TARGET_PROGRAMS
from blockyard.kernels.attention_plan import PADDING_SLOT, AttentionPlan, plan_attention


class StaticDecodes:
    """Buffers for one step at a time; plans of all sizes are views of them."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_context_tokens: int,
        block_size: int,
        num_kv_heads: int,
        device: torch.device,
        target_programs: int = DEFAULT_TARGET_PROGRAMS,
    ) -> None:
        self._largest = _empty_plan(max_rows, block_size, num_kv_heads, device, target_programs)
        self._max_blocks = -(-max_context_tokens // block_size)
        table_RB = torch.zeros(max_rows, self._max_blocks, dtype=torch.int32, device=device)
        items_W6 = torch.zeros(self._num_items(max_rows), 6, dtype=torch.int32, device=device)
        self._largest = replace(self._largest, block_table_RB=table_RB, decode_items_W6=items_W6)

    def _num_items(self, num_rows: int) -> int:
        """The most that a step of so many rows is cut into where nothing is shared: splits are so large that all of
        them together are at most the wanted programs, and each row rounds up once."""
        return num_rows + -(-self._largest.target_programs // self._largest.num_kv_heads)

    def plan(self, num_rows: int) -> AttentionPlan:
        """Of a step of exactly so many rows, padding included: always the same views. On the host it says nothing of
        contexts: only for backends that read tensors alone."""
        largest, num_items = self._largest, self._num_items(num_rows)
        return replace(
            largest,
            num_decodes=num_rows,
            num_partials=num_items,
            query_lens=largest.query_lens[:num_rows],
            context_lens=largest.context_lens[:num_rows],
            query_starts_R1=largest.query_starts_R1[: num_rows + 1],
            context_lens_R=largest.context_lens_R[:num_rows],
            block_table_RB=largest.block_table_RB[:num_rows],
            slot_mapping_T=largest.slot_mapping_T[:num_rows],
            positions_T=largest.positions_T[:num_rows],
            decode_items_W6=largest.decode_items_W6[:num_items],
            partial_starts_D1=largest.partial_starts_D1[: num_rows + 1],
        )

    def takes(self, plan: AttentionPlan) -> bool:
        """Whether a step is of decodes alone, and shares nothing, and is no longer or wider than the buffers."""
        return (
            0 < plan.num_rows == plan.num_decodes <= self._largest.num_rows
            and plan.window is None
            and not len(plan.shared_items_Y5)
            and len(plan.decode_items_W6) <= self._num_items(plan.num_rows)
            and plan.block_table_RB.shape[1] <= self._max_blocks
        )

    def fill(self, plan: AttentionPlan, num_rows: int) -> None:
        """Copy a step that is taken, padded to `num_rows`. Queued on the device; nothing waits."""
        target, rows, num_items = self._largest, plan.num_rows, len(plan.decode_items_W6)
        target.slot_mapping_T[:rows].copy_(plan.slot_mapping_T[:rows])
        target.slot_mapping_T[rows:num_rows].fill_(PADDING_SLOT)
        target.positions_T[:rows].copy_(plan.positions_T[:rows])
        target.context_lens_R[:rows].copy_(plan.context_lens_R)
        target.block_table_RB[:rows, : plan.block_table_RB.shape[1]].copy_(plan.block_table_RB)
        target.decode_items_W6[:num_items].copy_(plan.decode_items_W6)
        target.decode_items_W6[num_items : self._num_items(num_rows)].zero_()
        target.partial_starts_D1[: rows + 1].copy_(plan.partial_starts_D1)
        target.partial_starts_D1[rows + 1 : num_rows + 1].copy_(
            plan.partial_starts_D1[rows:].expand(num_rows - rows)
        )


def _empty_plan(
    num_rows: int, block_size: int, num_kv_heads: int, device: torch.device, target_programs: int
) -> AttentionPlan:
    plan = plan_attention(
        query_lens=[1] * num_rows,
        context_lens=[1] * num_rows,
        block_tables=[[0]] * num_rows,
        block_size=block_size,
        device=device,
        num_kv_heads=num_kv_heads,
        target_programs=target_programs,
    )
    plan.slot_mapping_T.fill_(PADDING_SLOT)
    plan.partial_starts_D1.zero_()
    return plan
