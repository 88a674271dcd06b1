"""A padded step in static buffers attends and writes as the step itself does, whatever the buffers held before."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.items import DEFAULT_GROUP
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.attention.static_plan import Bounds, StaticDecodes
from blockyard.kernels.interface import Backend

from .rig import CPU, DEVICE, NAN, Step, assert_near, make_step, small_plan

MAX_CONTEXT = 1024


def static_of(
    max_rows: int = 6,
    longest: int = MAX_CONTEXT,
    *,
    target_programs: int = 8,
    group: int = 2,
    device: torch.device = DEVICE,
) -> StaticDecodes:
    bounds = Bounds(num_kv_heads=2, group=group, target_programs=target_programs)
    options = {"block_size": 16, "bounds": bounds, "device": device}
    return StaticDecodes(max_rows=max_rows, max_context_tokens=longest, **options)


def padded(backend: Backend, step: Step, plan: AttentionPlan, num_rows: int) -> torch.Tensor:
    """Return the output of the step's rows. Padding rows have queries of NaN."""
    q_TND = step.q_TND.new_full((num_rows, *step.q_TND.shape[1:]), NAN)
    q_TND[: len(step.q_TND)] = step.q_TND
    return step.attend(backend, plan, q_TND)[: len(step.q_TND)]


def decodes(contexts: list[int], **options: Any) -> Step:
    return make_step([1] * len(contexts), contexts, target_programs=8, **options)


# Through the same buffers, one after the other: what rows share, nothing, less by other rows in fewer items; and split
# and whole, many rows and one.
SHARED = (
    ([961, 970, 1000, 961, 962, 963, 964, 965, 966], [60] * 9, 2),
    ([600, 33, 2], [], 0),
    ([20, *range(520, 528)], [0, *[32] * 8], 2),
    ([17], [], 0),
)
ALONE = tuple(
    (contexts, [], 0) for contexts in ([600, 17, 1, 300], [3], [33, 900], [16, 16, 16], [1023, 1, 64, 65])
)


@pytest.mark.parametrize(
    ("num_rows", "steps"),
    [(9, SHARED), (4, ALONE), (10, SHARED), (6, ALONE)],
    ids=["shared", "alone", "shared, one of padding", "alone, two of padding"],
)
@pytest.mark.quick_cases(2 if DEVICE == CPU else 4)
def test_attention_of_a_padded_step_is_the_steps_own(
    triton_backend: Backend, num_rows: int, steps: Sequence[tuple[list[int], list[int], int]]
) -> None:
    static = static_of(max_rows=10)
    shared, alone = static.plan(num_rows, is_shared=True), static.plan(num_rows)
    for contexts, shared_blocks, num_items in steps:
        step = decodes(contexts, shared_blocks=shared_blocks)
        assert static.takes(step.plan)
        assert len(step.plan.shared_items_Y5) == num_items
        static.fill(step.plan, num_rows)
        plan = shared if shared_blocks else alone
        assert_near(padded(triton_backend, step, plan, num_rows), step.expected())


def test_padding_writes_no_key(triton_backend: Backend) -> None:
    static, step = static_of(), decodes([20, 40])
    static.fill(decodes([30] * 6).plan, 6)
    static.fill(step.plan, 4)
    keys, values = (torch.randn(4, 2, 16, device=DEVICE) for _ in range(2))
    expected, pool = step.kv_pool_B2KPD.clone(), step.kv_pool_B2KPD
    triton_backend.write_kv(keys[:2], values[:2], expected, step.plan)
    triton_backend.write_kv(keys, values, pool, static.plan(4))
    assert torch.equal(pool.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_an_empty_step_of_any_size_reads_and_writes_nothing(triton_backend: Backend) -> None:
    """A capture runs such a step, and then the pool may hold anything."""
    static, step = static_of(), decodes([20])
    before = step.kv_pool_B2KPD.clone()
    for num_rows, is_shared in ((1, False), (3, False), (6, False), (6, True)):
        plan = static.plan(num_rows, is_shared=is_shared)
        triton_backend.write_kv(*torch.randn(2, num_rows, 2, 16, device=DEVICE).unbind(), before, plan)
        padded(triton_backend, step, plan, num_rows)
    assert torch.equal(before.nan_to_num(7.0), step.kv_pool_B2KPD.nan_to_num(7.0))


def test_what_does_not_fit_is_not_taken() -> None:
    static = static_of()
    assert static.takes(decodes([9] * 6).plan)
    assert not static.takes(decodes([9] * 7).plan)
    assert not static.takes(make_step([1, 3], [9, 9], target_programs=8).plan)
    assert not static.takes(decodes([9]).plan.windowed(4))
    assert not static.takes(decodes([MAX_CONTEXT + 1]).plan)


def test_items_never_outgrow_the_buffers() -> None:
    """The bound on splits, where contexts are as uneven as can be."""
    for num_rows, target in ((1, 528), (3, 528), (6, 8), (40, 64)):
        static = static_of(num_rows, 40_000, target_programs=target, group=DEFAULT_GROUP, device=CPU)
        for longest in (1, 257, 4_000, 40_000):
            contexts = [1 + (longest - 1) * (row % 3 == 0) for row in range(num_rows)]
            tables = [[row] * -(-context // 16) for row, context in enumerate(contexts)]
            cut = {"num_kv_heads": 2, "target_programs": target}
            plan = small_plan([1] * num_rows, contexts, tables, **cut)
            assert static.takes(plan), (num_rows, longest, len(plan.decode_items_W6))
