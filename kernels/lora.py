"""LoRA in kernels: adapters in slots of the device's memory, and which tokens of a step use which slot.

A linear layer with an adapter computes x W^T + (x A^T) B. `A` shrinks a token to the adapter's rank, and `B`, which
holds the adapter's scale, expands it. Tokens of one slot are computed together, in items of at most ITEM_TOKENS tokens.
Owns the layout of slots and plans. Does not own which adapter a slot holds.

Shapes: T tokens in the step, M tokens with an adapter, W items. S slots, P parts of a fused layer (q, k, v), R largest
rank, I input size, O output size.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

ITEM_TOKENS = 16
"""Most tokens of an item. A tensor core multiplies so many rows at once."""
BARE = -1
"""Stands for the slot of a token without an adapter."""
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLinear:
    """The adapters of one linear layer. Rows of `a` and `b` beyond a slot's rank may hold anything."""

    a_SPRI: torch.Tensor
    b_SRO: torch.Tensor
    ranks_S: torch.Tensor
    """Rank of each slot, int32. 0: its adapter leaves this layer as it is."""
    starts_P1: torch.Tensor
    """First output of each part, and the number of all outputs. int32."""
    widths: tuple[int, ...]
    """Outputs of each part, as `starts_P1` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPlan:
    """The tokens of a step by slot. Backends read the tensors alone, so that a recorded step may replace them."""

    tokens_M: torch.Tensor
    """Indices of tokens, int32, in order of slots."""
    items_W3: torch.Tensor
    """Slot, first index in `tokens_M` and number of tokens of each item, int32. An item of no tokens is padding."""
    slots_T: Int32Array
    """Slot of each token, on the host."""
    _parts: dict[tuple[int, int], "LoraPlan"] = field(default_factory=dict)

    def part(self, first: int, end: int) -> "LoraPlan":
        """Return the plan of a run of the tokens. It is made once for all layers."""
        if (first, end) not in self._parts:
            self._parts[first, end] = plan_lora(self.slots_T[first:end], self.tokens_M.device)
        return self._parts[first, end]

    def segments(self) -> list[tuple[int, slice]]:
        """Return each slot with its run of `tokens_M`. It reads the tensors, so the device must be a CPU."""
        found: list[tuple[int, slice]] = []
        for slot, first, count in self.items_W3.tolist():
            if found and found[-1][0] == slot and count:
                found[-1] = slot, slice(found[-1][1].start, first + count)
            elif count:
                found.append((slot, slice(first, first + count)))
        return found


def plan_lora(slots_T: npt.ArrayLike, device: torch.device) -> LoraPlan:
    """Group the tokens of a step by slot. BARE tokens are in no group."""
    slots = np.asarray(slots_T, dtype=np.int32)
    order = np.argsort(slots, kind="stable")
    tokens = order[np.count_nonzero(slots < 0) :].astype(np.int32)
    used, starts, counts = np.unique(slots[tokens], return_index=True, return_counts=True)
    items = [
        (slot, first, min(ITEM_TOKENS, start + count - first))
        for slot, start, count in zip(used.tolist(), starts.tolist(), counts.tolist(), strict=True)
        for first in range(start, start + count, ITEM_TOKENS)
    ]
    return LoraPlan(
        tokens_M=_on_device(tokens, device),
        items_W3=_on_device(np.array(items, dtype=np.int32).reshape(-1, 3), device),
        slots_T=slots,
    )


def _on_device(array: Int32Array, device: torch.device) -> torch.Tensor:
    """Return an array on the device. The copy to a GPU is queued, and the host does not wait for it."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not array.size:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class StaticLora:
    """Buffers with fixed addresses that hold the plan of one decode step at a time."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._tokens_M = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._items_W3 = torch.zeros(max_rows, 3, dtype=torch.int32, device=device)

    def plan(self, num_rows: int) -> LoraPlan:
        """Return the plan of a step of so many rows, padding included: always the same views."""
        return LoraPlan(
            tokens_M=self._tokens_M[:num_rows],
            items_W3=self._items_W3[:num_rows],
            slots_T=np.full(num_rows, BARE, dtype=np.int32),
        )

    def fill(self, plan: LoraPlan, num_rows: int) -> None:
        """Copy the plan of a decode step into the buffers, padded to `num_rows`. The copies are queued on the
        device."""
        num_items = len(plan.items_W3)
        self._tokens_M[: len(plan.tokens_M)].copy_(plan.tokens_M)
        self._items_W3[:num_items].copy_(plan.items_W3)
        self._items_W3[num_items:num_rows].zero_()
