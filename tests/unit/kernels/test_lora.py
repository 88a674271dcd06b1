"""Adapters of every backend against the formula in double precision."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from blockyard.kernels.interface import Backend
from blockyard.kernels.lora import BARE, ITEM_TOKENS, LoraLinear, StaticLora, plan_lora
from blockyard.kernels.torch.deterministic import DeterministicTorchBackend

from .rig import CPU, DEVICE, FLOATS, NAN, assert_near, crossed, normal, on_each_backend, seeded

BackendOf = Callable[[str], Backend]
RANKS = (5, 0, 8, 1)
"""Ranks of the slots. The second leaves the layer as it is."""


def random_slots(
    num_inputs: int, widths: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device = DEVICE
) -> LoraLinear:
    """Return slots whose rows beyond each rank hold NaN."""
    generator, ranks = seeded(3), RANKS
    slots = LoraLinear(
        a_SPRI=torch.zeros(len(ranks), len(widths), max(ranks), num_inputs, dtype=dtype, device=device),
        b_SRO=torch.zeros(len(ranks), max(ranks), sum(widths), dtype=dtype, device=device),
        ranks_S=torch.zeros(len(ranks), dtype=torch.int32, device=device),
        starts_P1=torch.tensor([0, *accumulate(widths)], dtype=torch.int32, device=device),
        widths=tuple(widths),
    )
    for tensor, at in ((slots.a_SPRI, 2), (slots.b_SRO, 1)):
        drawn = torch.randn(tensor.shape, generator=generator) / tensor.shape[-1 if at == 2 else 1] ** 0.5
        for slot, rank in enumerate(ranks):
            drawn[slot].narrow(at - 1, rank, max(ranks) - rank).fill_(NAN)
        tensor.copy_(drawn)
    slots.ranks_S.copy_(torch.tensor(ranks))
    return slots


def expected_outputs(
    out_TO: torch.Tensor, x_TI: torch.Tensor, slots: LoraLinear, slot_of: Sequence[int]
) -> torch.Tensor:
    result = out_TO.double().clone()
    for token, slot in enumerate(slot_of):
        rank = 0 if slot == BARE else int(slots.ranks_S[slot])
        first = 0
        for part, width in enumerate(slots.widths if rank else ()):
            shrunk = slots.a_SPRI[slot, part, :rank].double() @ x_TI[token].double()
            result[token, first : first + width] += (
                shrunk @ slots.b_SRO[slot, :rank, first : first + width].double()
            )
            first += width
    return result.to(out_TO.dtype)


MIXED = (BARE, 0, 2, 0, BARE, 3, 1, 2, 2)


STEPS = [
    (MIXED, 48, (64, 16, 16)),
    (MIXED, 100, (65,)),
    ((0,), 33, (130, 130)),
    ((2,) * (2 * ITEM_TOKENS + 3) + (0,) * 5, 64, (80,)),
    ((BARE,) * 4, 16, (16,)),
]


@on_each_backend(crossed(step=STEPS, dtype=FLOATS), usual=5)
def test_each_token_gets_its_adapter(backend_of: BackendOf, run: tuple[str, dict[str, Any]]) -> None:
    (slot_of, num_inputs, widths), dtype = run[1]["step"], run[1]["dtype"]
    slots, x_TI = random_slots(num_inputs, widths, dtype), normal(len(slot_of), num_inputs, dtype=dtype)
    out_TO = torch.ones(len(slot_of), sum(widths), dtype=dtype, device=DEVICE)
    expected = expected_outputs(out_TO, x_TI, slots, slot_of)
    backend_of(run[0]).add_lora(out_TO, x_TI, slots, plan_lora(slot_of, DEVICE))
    assert_near(out_TO, expected)
    bare = [token for token, slot in enumerate(slot_of) if slot in (BARE, 1)]
    assert torch.equal(out_TO[bare], torch.ones_like(out_TO[bare]))


def test_padding_computes_nothing(backend: Backend) -> None:
    slots = random_slots(48, (64, 16, 16))
    x_TI = normal(12, 48)
    static, out_TO = StaticLora(12, DEVICE), torch.ones(12, 96, device=DEVICE)
    for slot_of in ((0,) * 9, MIXED[:7]):  # the second step has fewer items than what the buffers held
        static.fill(plan_lora(slot_of, DEVICE), 12)
        out_TO.fill_(1.0)
        backend.add_lora(out_TO, x_TI, slots, static.plan(12))
        assert_near(out_TO, expected_outputs(torch.ones_like(out_TO), x_TI, slots, slot_of))


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    """In deterministic mode."""
    backend, slots, x_TI = (
        DeterministicTorchBackend(),
        random_slots(64, (80, 48), device=CPU),
        normal(40, 64, on=CPU),
    )
    alone_TO, all_TO = torch.zeros(1, 128), torch.zeros(40, 128)
    backend.add_lora(alone_TO, x_TI[7:8], slots, plan_lora((2,), CPU))
    backend.add_lora(all_TO, x_TI, slots, plan_lora(np.arange(40) % 3 - 1 + (np.arange(40) == 7) * 2, CPU))
    assert torch.equal(alone_TO[0], all_TO[7])


def test_a_plan_names_each_token_with_an_adapter_once() -> None:
    slot_of = [BARE, 3, 0, 3, BARE, *[1] * 40, 0]
    plan = plan_lora(slot_of, CPU)
    assert sorted(plan.tokens_M.tolist()) == [token for token, slot in enumerate(slot_of) if slot != BARE]
    for slot, first, count in plan.items_W3.tolist():
        assert 1 <= count <= ITEM_TOKENS
        assert {slot_of[token] for token in plan.tokens_M[first : first + count].tolist()} == {slot}
    assert [slot for slot, _ in plan.segments()] == [0, 1, 3]
    part = plan.part(1, 4)
    assert part.tokens_M.tolist() == [1, 0, 2]
