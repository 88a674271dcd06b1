"""A padded step in static buffers attends and writes as the step itself does, whatever the buffers held before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan, plan_attention
from blockyard.kernels.attention.static_plan import Bounds, StaticDecodes
from blockyard.kernels.interface import Backend

AssertNear = Callable[[torch.Tensor, torch.Tensor], None]
MakeStep = Callable[..., Any]
MAX_ROWS = 6
MAX_CONTEXT = 1024


@pytest.fixture
def static(device: torch.device) -> StaticDecodes:
    return StaticDecodes(
        max_rows=MAX_ROWS,
        max_context_tokens=MAX_CONTEXT,
        block_size=16,
        bounds=Bounds(num_kv_heads=2, group=2, target_programs=8),
        device=device,
    )


def attend(backend: Backend, step: Any, plan: AttentionPlan, num_rows: int) -> torch.Tensor:
    """Return the output of the step's rows. Padding rows have queries of NaN."""
    q_TND = step.q_TND.new_full((num_rows, *step.q_TND.shape[1:]), float("nan"))
    q_TND[: len(step.q_TND)] = step.q_TND
    out_TND = torch.full_like(q_TND, float("nan"))
    backend.attention(q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=out_TND)
    return out_TND[: len(step.q_TND)]


@pytest.mark.ci
@pytest.mark.parametrize("num_rows", [9, 10])
def test_a_padded_step_reads_what_its_rows_share_once_for_all(
    triton_backend: Backend, make_step: MakeStep, assert_near: AssertNear, device: torch.device, num_rows: int
) -> None:
    """Through the same buffers as steps that share nothing, or less, by other rows, in fewer items."""
    static = StaticDecodes(
        max_rows=10,
        max_context_tokens=MAX_CONTEXT,
        block_size=16,
        bounds=Bounds(num_kv_heads=2, group=2, target_programs=8),
        device=device,
    )
    shared, alone = static.plan(num_rows, is_shared=True), static.plan(num_rows)
    for contexts, shared_blocks, num_items in (
        ([961, 970, 1000, 961, 962, 963, 964, 965, 966], [60] * 9, 2),
        ([600, 33, 2], [], 0),
        ([20, *range(520, 528)], [0, *[32] * 8], 2),
        ([17], [], 0),
    ):
        step = make_step([1] * len(contexts), contexts, shared_blocks=shared_blocks, target_programs=8)
        assert static.takes(step.plan)
        assert len(step.plan.shared_items_Y5) == num_items
        static.fill(step.plan, num_rows)
        own = attend(triton_backend, step, step.plan, len(contexts))
        assert not own.isnan().any()
        plan = shared if shared_blocks else alone
        assert_near(attend(triton_backend, step, plan, num_rows), own)


@pytest.mark.ci
@pytest.mark.parametrize("num_rows", [4, 6])
def test_attention_of_a_padded_step_is_the_steps_own(
    triton_backend: Backend,
    make_step: MakeStep,
    assert_near: AssertNear,
    static: StaticDecodes,
    num_rows: int,
) -> None:
    """One after the other, through the same buffers: split and whole, many rows and one."""
    plan = static.plan(num_rows)
    for contexts in ([600, 17, 1, 300], [3], [33, 900], [16, 16, 16], [1023, 1, 64, 65]):
        step = make_step([1] * len(contexts), contexts, target_programs=8)
        assert static.takes(step.plan)
        static.fill(step.plan, num_rows)
        own = attend(triton_backend, step, step.plan, len(contexts))
        assert not own.isnan().any()
        assert_near(attend(triton_backend, step, plan, num_rows), own)


def test_padding_writes_no_key(
    triton_backend: Backend, make_step: MakeStep, static: StaticDecodes, device: torch.device
) -> None:
    step = make_step([1, 1], [20, 40], target_programs=8)
    static.fill(make_step([1] * 6, [30] * 6, target_programs=8).plan, 6)
    static.fill(step.plan, 4)
    keys, values = (torch.randn(4, 2, 16, device=device) for _ in range(2))
    expected, pool = step.kv_pool_B2KPD.clone(), step.kv_pool_B2KPD
    triton_backend.write_kv(keys[:2], values[:2], expected, step.plan)
    triton_backend.write_kv(keys, values, pool, static.plan(4))
    assert torch.equal(pool.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_an_empty_step_of_any_size_reads_and_writes_nothing(
    triton_backend: Backend, make_step: MakeStep, static: StaticDecodes, device: torch.device
) -> None:
    """A capture runs such a step, and then the pool may hold anything."""
    step = make_step([1], [20], target_programs=8)
    before = step.kv_pool_B2KPD.clone()
    for num_rows, is_shared in ((1, False), (3, False), (MAX_ROWS, False), (MAX_ROWS, True)):
        plan = static.plan(num_rows, is_shared=is_shared)
        triton_backend.write_kv(*torch.randn(2, num_rows, 2, 16, device=device).unbind(), before, plan)
        attend(triton_backend, step, plan, num_rows)
    assert torch.equal(before.nan_to_num(7.0), step.kv_pool_B2KPD.nan_to_num(7.0))


def test_what_does_not_fit_is_not_taken(make_step: MakeStep, static: StaticDecodes) -> None:
    assert static.takes(make_step([1] * 6, [9] * 6, target_programs=8).plan)
    assert not static.takes(make_step([1] * 7, [9] * 7, target_programs=8).plan)
    assert not static.takes(make_step([1, 3], [9, 9], target_programs=8).plan)
    assert not static.takes(make_step([1], [9], target_programs=8).plan.windowed(4))
    assert not static.takes(make_step([1], [MAX_CONTEXT + 1], target_programs=8).plan)


def test_items_never_outgrow_the_buffers(make_step: MakeStep) -> None:
    """The bound on splits, where contexts are as uneven as can be."""
    for num_rows, target in ((1, 528), (3, 528), (6, 8), (40, 64)):
        static = StaticDecodes(
            max_rows=num_rows,
            max_context_tokens=40_000,
            block_size=16,
            bounds=Bounds(num_kv_heads=2, target_programs=target),
            device=torch.device("cpu"),
        )
        for longest in (1, 257, 4_000, 40_000):
            contexts = [1 + (longest - 1) * (row % 3 == 0) for row in range(num_rows)]
            plan = make_plan(contexts, target)
            assert static.takes(plan), (num_rows, longest, len(plan.decode_items_W6))


def make_plan(contexts: list[int], target_programs: int) -> AttentionPlan:
    return plan_attention(
        query_lens=[1] * len(contexts),
        context_lens=contexts,
        block_tables=[[row] * -(-context // 16) for row, context in enumerate(contexts)],
        block_size=16,
        device="cpu",
        num_kv_heads=2,
        target_programs=target_programs,
    )
