"""Device slots: the memory of a device that holds adapters, and the loads into it.

A slot is overwritten only by a step that no longer needs what it held, on the device's own queue. So a load never waits
for earlier steps on the host. Where a model is divided among ranks, rank 0 alone has adapters on its host. It
broadcasts each one within the step that loads it, and every rank keeps its part. Does not own which adapter goes into
which slot (../cache/adapter_slots.py).

Shapes: L layers, S slots, P parts of a fused layer, R largest rank, I input size, O output size. T tokens and Q rows of
a step, N loads.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from blockyard.kernels.lora import LoraLinear, plan_lora
from blockyard.kernels.torch.huge_pages import advise_empty
from blockyard.worker.lora.layout import LinearPart, LinearWeights, linear_parts
from blockyard.worker.model.division import ModelPart
from blockyard.worker.model.lora import LoraLayer, LoraStep
from blockyard.worker.parallel.collective import Collective
from blockyard.worker.parallel.step_arrays import NO_LOADS, Integers
from blockyard.worker.sequences.adapter import Adapter


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
        part: LinearPart,
        collective: Collective,
        *,
        num_layers: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._part, self._collective = part, collective
        shape = part.shape
        starts = [0, *accumulate(shape.widths)]
        parts = len(shape.parts)
        self._a_LSPRI = torch.empty(
            num_layers, num_slots, parts, max_rank, shape.num_inputs, dtype=dtype, device=device
        )
        self._b_LSRO = torch.empty(num_layers, num_slots, max_rank, starts[-1], dtype=dtype, device=device)
        for memory in (self._a_LSPRI, self._b_LSRO):
            advise_empty(memory)
            memory.zero_()
        self._ranks_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        starts_P1 = torch.tensor(starts, dtype=torch.int32, device=device)
        self.layers = [
            LoraLinear(
                a_SPRI=a_SPRI, b_SRO=b_SRO, ranks_S=self._ranks_S, starts_P1=starts_P1, widths=shape.widths
            )
            for a_SPRI, b_SRO in zip(self._a_LSPRI, self._b_LSRO, strict=True)
        ]

    def leave(self, slot: int) -> None:
        """Have an adapter that leaves this layer as it is."""
        self._ranks_S[slot].fill_(0)

    def load(self, slot: int, rank: int, weights: LinearWeights | None) -> None:
        """Have a slot hold these weights. None, on a rank other than 0: those that rank 0 broadcasts."""
        self._ranks_S[slot].fill_(rank)
        if self._collective.size > 1:
            self._load_part(slot, rank, weights)
            return
        assert weights is not None, "one rank has all weights"
        self._a_LSPRI[:, slot, :, :rank].copy_(weights.a_LPRI, non_blocking=True)
        self._b_LSRO[:, slot, :rank].copy_(weights.b_LRO, non_blocking=True)

    def _load_part(self, slot: int, rank: int, weights: LinearWeights | None) -> None:
        """Broadcast one layer after another, so that the device needs room for one beside the slots."""
        whole = self._part.whole
        a_PRI = self._a_LSPRI.new_empty(len(whole.parts), rank, whole.num_inputs)
        b_RO = self._b_LSRO.new_empty(rank, sum(whole.widths))
        for layer in range(len(self._a_LSPRI)):
            if weights is not None:
                a_PRI.copy_(weights.a_LPRI[layer], non_blocking=True)
                b_RO.copy_(weights.b_LRO[layer], non_blocking=True)
            self._collective.broadcast(a_PRI)
            self._collective.broadcast(b_RO)
            self._part.copy(
                a_PRI,
                b_RO,
                to_a_PRI=self._a_LSPRI[layer, slot, :, :rank],
                to_b_RO=self._b_LSRO[layer, slot, :rank],
            )


class DeviceSlots:
    """The slots of one runner. Not thread-safe: one step at a time."""

    def __init__(
        self,
        part: ModelPart,
        collective: Collective,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device = device
        num_layers = part.config.num_layers
        self._linears = {
            name: _Slots(
                linear,
                collective,
                num_layers=num_layers,
                num_slots=num_slots,
                max_rank=max_rank,
                dtype=dtype,
                device=device,
            )
            for name, linear in linear_parts(part).items()
        }
        self.layers = tuple(
            LoraLayer(**{name: slots.layers[layer] for name, slots in self._linears.items()})
            for layer in range(num_layers)
        )
        self._held: dict[int, Adapter] = {}
        self._loads: list[AdapterLoad] = []

    def load(self, adapters: Iterable[tuple[int, Adapter]]) -> None:
        """Have each slot hold its adapter. A load that raises leaves its slot empty."""
        for slot, adapter in self._lacking(adapters):
            self._held.pop(slot, None)
            began = self._mark()
            self._load(slot, adapter.rank, _weights(adapter))
            self._loads.append(AdapterLoad(adapter.fingerprint, began, self._mark()))
            self._held[slot] = adapter

    def due(self, adapters: Iterable[tuple[int, Adapter]]) -> Integers:
        """Return the loads [N, 3] that `load` makes, for the `follow` of other ranks."""
        loads = [
            (
                slot,
                adapter.rank,
                sum(1 << bit for bit, name in enumerate(self._linears) if name in _weights(adapter)),
            )
            for slot, adapter in self._lacking(adapters)
        ]
        return np.array(loads, dtype=np.int64) if loads else NO_LOADS

    def follow(self, loads_N3: Integers) -> None:
        """Make the loads of rank 0, on another rank."""
        for slot, rank, bits in loads_N3.tolist():
            self._load(slot, rank, {name: None for bit, name in enumerate(self._linears) if bits >> bit & 1})

    def forget(self, adapters: Iterable[tuple[int, Adapter]]) -> None:
        """Load these once more when a step needs them: another rank may have failed to."""
        for slot, _ in adapters:
            self._held.pop(slot, None)

    def _lacking(self, adapters: Iterable[tuple[int, Adapter]]) -> list[tuple[int, Adapter]]:
        return [(slot, adapter) for slot, adapter in adapters if self._held.get(slot) is not adapter]

    def _load(self, slot: int, rank: int, weights: Mapping[str, LinearWeights | None]) -> None:
        for name, linear in self._linears.items():
            if name in weights:
                linear.load(slot, rank, weights[name])
            else:
                linear.leave(slot)

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

    def step(self, slots_Q: Integers, query_Q: Integers, *, ends_narrow: bool) -> LoraStep:
        """Return the slots and plans of a step whose rows have these slots, or BARE, and so many tokens each. With
        `ends_narrow`, only the last token of each row is computed behind the last attention."""
        slots_T = np.repeat(slots_Q, query_Q)
        rows_plan = plan_lora(slots_Q, self._device) if ends_narrow else None
        return LoraStep(layers=self.layers, plan=plan_lora(slots_T, self._device), rows_plan=rows_plan)


def _weights(adapter: Adapter) -> Mapping[str, LinearWeights]:
    assert isinstance(adapter.weights, dict), "an adapter without weights"
    return adapter.weights
