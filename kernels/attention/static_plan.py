"""Plans of decode steps in buffers with fixed addresses, as a captured graph needs them. The capture fixes what the
graph reads, and how much.

A step of fewer rows is padded. A padding row has no item, so it reads no keys. Its slot is PADDING_SLOT, so it writes
none, and its output is arbitrary. A padding item has no query token, so its program ends at once. The same holds for
items over a shared prefix. Only some graphs have them, because they cost one more launch in each layer.

Shapes: R rows of the largest step, r rows of one size, n rows of a step. B blocks of the longest context, W decode
items, Y items over shared prefixes.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from blockyard.kernels.attention.items import DEFAULT_GROUP, DEFAULT_TARGET_PROGRAMS
from blockyard.kernels.attention.plan import PADDING_SLOT, AttentionPlan, plan_attention, table_width
from blockyard.kernels.attention.shared_prefix import MIN_SHARERS, members_of_item


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Upper bounds of the items and partial results of a decode step, for contexts of any length.

    Splits are so large that all of them together are at most the wanted programs. Each row, or each item's share of a
    group, rounds up once.
    """

    num_kv_heads: int
    group: int = DEFAULT_GROUP
    target_programs: int = DEFAULT_TARGET_PROGRAMS

    def _splits(self) -> int:
        """Return the most splits of all keys that a kv head's rows read, before each row rounds up."""
        return -(-self.target_programs // self.num_kv_heads)

    def num_items(self, num_rows: int) -> int:
        """Return the most items over the keys that rows read alone."""
        return num_rows + self._splits()

    def num_shared_items(self, num_rows: int) -> int:
        """Return the most items over shared prefixes. A group that does not fill its last item has one more."""
        return num_rows // members_of_item(self.group) + num_rows // MIN_SHARERS + self._splits()

    def num_partials(self, num_rows: int, *, is_shared: bool) -> int:
        """Return the most partial results: one for each member of a shared item, one for each split of a row."""
        if not is_shared:
            return self.num_items(num_rows)
        of_items = self.num_shared_items(num_rows) * members_of_item(self.group)
        return self.num_items(num_rows) + min(of_items, num_rows * (self._splits() + 1))

    def partial_bytes(self, num_rows: int, head_dim: int) -> int:
        """Return the bytes of the partial results: fp32 outputs and log-sum-exps of all heads. Half as much again
        allows for the workspace's growth."""
        numbers = self.num_kv_heads * self.group * (head_dim + 1)
        return 4 * numbers * self.num_partials(num_rows, is_shared=True) * 3 // 2


class StaticDecodes:
    """Buffers that hold one decode step at a time. The plans of all sizes are views of them."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_context_tokens: int,
        block_size: int,
        bounds: Bounds,
        device: torch.device,
    ) -> None:
        self._bounds = bounds
        self._max_blocks = table_width(-(-max_context_tokens // block_size))
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        self._largest = replace(
            _empty_plan(max_rows, block_size, bounds, device),
            block_table_RB=zeros(max_rows, self._max_blocks),
            decode_items_W6=zeros(bounds.num_items(max_rows), 6),
            shared_items_Y5=zeros(bounds.num_shared_items(max_rows), 5),
            shared_members_M=zeros(max_rows),
        )

    def plan(self, num_rows: int, *, is_shared: bool = False) -> AttentionPlan:
        """Return the plan of a step of exactly so many rows, padding included: always the same views. Its fields on the
        host say nothing of contexts, so only backends that read tensors alone can use it."""
        largest, bounds = self._largest, self._bounds
        num_shared = bounds.num_shared_items(num_rows) if is_shared else 0
        return replace(
            largest,
            num_decodes=num_rows,
            num_partials=bounds.num_partials(num_rows, is_shared=is_shared),
            query_lens=largest.query_lens[:num_rows],
            context_lens=largest.context_lens[:num_rows],
            query_starts_R1=largest.query_starts_R1[: num_rows + 1],
            context_lens_R=largest.context_lens_R[:num_rows],
            block_table_RB=largest.block_table_RB[:num_rows],
            slot_mapping_T=largest.slot_mapping_T[:num_rows],
            positions_T=largest.positions_T[:num_rows],
            decode_items_W6=largest.decode_items_W6[: bounds.num_items(num_rows)],
            shared_items_Y5=largest.shared_items_Y5[:num_shared],
            partial_starts_D1=largest.partial_starts_D1[: num_rows + 1],
        )

    def takes(self, plan: AttentionPlan) -> bool:
        """Return whether a step has decodes alone and no window, and fits the buffers."""
        bounds, num_rows = self._bounds, plan.num_rows
        return (
            0 < num_rows == plan.num_decodes <= self._largest.num_rows
            and plan.window is None
            and len(plan.decode_items_W6) <= bounds.num_items(num_rows)
            and len(plan.shared_items_Y5) <= bounds.num_shared_items(num_rows)
            and plan.num_partials <= bounds.num_partials(num_rows, is_shared=True)
            and plan.block_table_RB.shape[1] <= self._max_blocks
        )

    def fill(self, plan: AttentionPlan, num_rows: int) -> None:
        """Copy a step that `takes` accepts into the buffers, padded to `num_rows`. The copies are queued on the
        device."""
        target, rows, num_items = self._largest, plan.num_rows, len(plan.decode_items_W6)
        target.slot_mapping_T[:rows].copy_(plan.slot_mapping_T[:rows])
        target.slot_mapping_T[rows:num_rows].fill_(PADDING_SLOT)
        target.positions_T[:rows].copy_(plan.positions_T[:rows])
        target.context_lens_R[:rows].copy_(plan.context_lens_R)
        target.block_table_RB[:rows, : plan.block_table_RB.shape[1]].copy_(plan.block_table_RB)
        target.decode_items_W6[:num_items].copy_(plan.decode_items_W6)
        target.decode_items_W6[num_items : self._bounds.num_items(num_rows)].zero_()
        if num_shared := len(plan.shared_items_Y5):
            target.shared_items_Y5[:num_shared].copy_(plan.shared_items_Y5)
            target.shared_items_Y5[num_shared : self._bounds.num_shared_items(num_rows)].zero_()
            target.shared_members_M[: len(plan.shared_members_M)].copy_(plan.shared_members_M)
        target.partial_starts_D1[: rows + 1].copy_(plan.partial_starts_D1)
        target.partial_starts_D1[rows + 1 : num_rows + 1].copy_(
            plan.partial_starts_D1[rows:].expand(num_rows - rows)
        )


def _empty_plan(num_rows: int, block_size: int, bounds: Bounds, device: torch.device) -> AttentionPlan:
    plan = plan_attention(
        query_lens=[1] * num_rows,
        context_lens=[1] * num_rows,
        block_tables=[[0]] * num_rows,
        block_size=block_size,
        device=device,
        num_kv_heads=bounds.num_kv_heads,
        group=bounds.group,
        target_programs=bounds.target_programs,
    )
    plan.slot_mapping_T.fill_(PADDING_SLOT)
    plan.partial_starts_D1.zero_()
    return plan
