"""Device slots: the memory of a device that holds adapters, and the loads into it.

A slot is overwritten only by a step that no longer needs what it held, on the device's own queue. So a load never waits
for earlier steps on the host. Does not own which adapter goes into which slot (../cache/adapter_slots.py).

Shapes: L layers, S slots, P parts of a fused layer, R largest rank, I input size, O output size.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from blockyard.kernels.lora import BARE, LoraLinear, plan_lora
from blockyard.worker.lora.layout import AdapterWeights, LinearShape, linear_shapes
from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.lora import LoraLayer, LoraStep
from blockyard.worker.sequences.adapter import Adapter
from blockyard.worker.sequences.step_plan import ScheduledRow


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """One load of an adapter, with the moments when it began and ended: seconds, or events of a GPU."""

    fingerprint: str
    began: Any
    ended: Any

    def seconds(self) -> float:
        """Return the time that the load took, once its step has ended."""
        if isinstance(self.began, float):
            return float(self.ended - self.began)
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1000


class _Slots:
    """The slots of one linear layer of all decoder layers."""

    def __init__(
        self,
        shape: LinearShape,
        *,
        num_layers: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        starts = [0, *accumulate(shape.widths)]
        parts = len(shape.parts)
        self._a_LSPRI = torch.zeros(
            num_layers, num_slots, parts, max_rank, shape.num_inputs, dtype=dtype, device=device
        )
        self._b_LSRO = torch.zeros(num_layers, num_slots, max_rank, starts[-1], dtype=dtype, device=device)
        self._ranks_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        starts_P1 = torch.tensor(starts, dtype=torch.int32, device=device)
        self.layers = [
            LoraLinear(
                a_SPRI=a_SPRI, b_SRO=b_SRO, ranks_S=self._ranks_S, starts_P1=starts_P1, widths=shape.widths
            )
            for a_SPRI, b_SRO in zip(self._a_LSPRI, self._b_LSRO, strict=True)
        ]

    def load(self, slot: int, rank: int, name: str, weights: AdapterWeights) -> None:
        linear = weights.get(name)
        self._ranks_S[slot].fill_(0 if linear is None else rank)
        if linear is not None:
            self._a_LSPRI[:, slot, :, :rank].copy_(linear.a_LPRI, non_blocking=True)
            self._b_LSRO[:, slot, :rank].copy_(linear.b_LRO, non_blocking=True)


class DeviceSlots:
    """The slots of one runner. Not thread-safe: one step at a time."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device = device
        self._linears = {
            name: _Slots(
                shape,
                num_layers=config.num_layers,
                num_slots=num_slots,
                max_rank=max_rank,
                dtype=dtype,
                device=device,
            )
            for name, shape in linear_shapes(config).items()
        }
        self.layers = tuple(
            LoraLayer(**{name: slots.layers[layer] for name, slots in self._linears.items()})
            for layer in range(config.num_layers)
        )
        self._held: dict[int, Adapter] = {}
        self._loads: list[AdapterLoad] = []

    def load(self, adapters: Iterable[tuple[int, Adapter]]) -> None:
        """Have each slot hold its adapter. A load that raises leaves its slot empty."""
        for slot, adapter in adapters:
            if self._held.get(slot) is adapter:
                continue
            self._held.pop(slot, None)
            weights = adapter.weights
            assert isinstance(weights, dict), "an adapter without weights"
            began = self._mark()
            for name, linear in self._linears.items():
                linear.load(slot, adapter.rank, name, weights)
            self._loads.append(AdapterLoad(adapter.fingerprint, began, self._mark()))
            self._held[slot] = adapter

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads since the last call. Their time is known once the step has ended."""
        loads, self._loads = self._loads, []
        return loads

    def step(
        self, adapters: Iterable[tuple[int, Adapter]], rows: Sequence[ScheduledRow], *, ends_narrow: bool
    ) -> LoraStep:
        """Return the slots and plans of a step with these rows. With `ends_narrow`, only the last token of each row is
        computed behind the last attention."""
        slot_of = {adapter.fingerprint: slot for slot, adapter in adapters}
        slots_R = np.array(
            [BARE if (own := row.sequence.adapter) is None else slot_of[own.fingerprint] for row in rows],
            dtype=np.int32,
        )
        slots_T = np.repeat(slots_R, [row.num_tokens for row in rows])
        rows_plan = plan_lora(slots_R, self._device) if ends_narrow else None
        return LoraStep(layers=self.layers, plan=plan_lora(slots_T, self._device), rows_plan=rows_plan)
