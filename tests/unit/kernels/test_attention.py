"""Paged attention of each backend against the reference: windows, KV in 8 bits and shared prefixes too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.attention.shared_prefix import MIN_SHARED_TOKENS, MIN_SHARERS
from blockyard.kernels.interface import Backend
from blockyard.kernels.kv_pool import numbers_of, scales_of
from blockyard.kernels.torch import attention as torch_attention
from blockyard.kernels.torch import reference
from blockyard.kernels.torch.backend import TorchBackend
from blockyard.kernels.torch.deterministic import CHUNK_TOKENS, DeterministicTorchBackend

from .rig import CPU, KV_DTYPES, NAN, Step, assert_near, make_step, on_each_backend, small_plan

BackendOf = Callable[[str], Backend]
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    window: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def step(self, **more: Any) -> tuple[Step, AttentionPlan]:
        step = make_step(self.query_lens, self.context_lens, **self.options | more)
        return step, step.plan if self.window is None else step.plan.windowed(self.window)


def case(rows: tuple[Sequence[int], Sequence[int]], *, window: int | None = None, **options: Any) -> Case:
    return Case(*rows, window, options)


MIXED = [1, 1, 1, 5, 17, 70], [1, 17, 100, 5, 40, 131]
SHORT = [1, 1, 1, 5, 17], [1, 17, 65, 5, 40]
FEW = [1, 1, 20], [300, 9, 52]
DEEP = MIN_SHARED_TOKENS // 64
SHARED = [DEEP, 0, *[DEEP] * (MIN_SHARERS - 1), DEEP + 1]
SHARING = [*[1] * len(SHARED), 20], [64 * blocks + own for own, blocks in enumerate(SHARED, 1)] + [20]
# The first ones differ most. Those further down are crossings of what they try.
CASES = {
    "decodes of any context": case(
        ([1] * 11, [1, 15, 16, 17, 31, 33, 63, 64, 65, 129, 3]), num_heads=4, num_kv_heads=1
    ),
    "chunks": case(
        ([2, 15, 16, 17, 63, 65, 129, 130], [2, 15, 16, 33, 63, 130, 129, 131]), num_heads=3, num_kv_heads=1
    ),
    "14 heads, blocks of 64": case(SHORT, num_heads=14, block_size=64),
    "many tiles, bf16": case(
        ([1, 1, 70, 140], [300, 128, 211, 140]), num_heads=6, num_kv_heads=2, dtype=torch.bfloat16
    ),
    "heads of 128, fp16": case(([1, 1, 20], [70, 9, 52]), head_dim=128, dtype=torch.float16),
    "heads of 32, bf16": case(([1, 1, 20], [70, 9, 52]), head_dim=32, dtype=torch.bfloat16),
    "window 17": case(MIXED, window=17),
    "window across splits": case(
        ([1, 1, 2], [900, 30, 40]), window=300, num_heads=2, num_kv_heads=1, target_programs=528
    ),
    "window 33, blocks of 32": case(([1, 1, 40], [32, 97, 150]), window=33, block_size=32),
    "int8, window 19, bf16": case(FEW, window=19, head_dim=64, dtype=torch.bfloat16, kv_dtype=torch.int8),
    "fp8, fp16": case(FEW, head_dim=64, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn),
    "cascade": case(SHARING, shared_blocks=SHARED, block_size=64, num_heads=5, num_kv_heads=1, group=5),
    "cascade, fp8 in fp16": case(
        SHARING,
        shared_blocks=SHARED,
        block_size=64,
        dtype=torch.float16,
        kv_dtype=torch.float8_e4m3fn,
        group=2,
    ),
    **{
        f"{heads} heads, blocks of {size}": case(SHORT, num_heads=heads, block_size=size)
        for heads, size in ((2, 16), (8, 32), (16, 64))
    },
    "heads of 64, fp16": case(([1, 1, 20], [70, 9, 52]), head_dim=64, dtype=torch.float16),
    "many tiles, fp16": case(
        ([1, 1, 70, 140], [300, 128, 211, 140]), num_heads=6, num_kv_heads=2, dtype=torch.float16
    ),
    **{f"window {window}": case(MIXED, window=window) for window in (1, 15, 16, 50, 129, 131, 1000)},
    **{
        f"window {window}, blocks of {size}": case(
            ([1, 1, 40], [size, 3 * size + 1, 150]), window=window, block_size=size
        )
        for size in (32, 64)
        for window in (size - 1, size)
    },
    **{
        f"window 45, {heads} of {kv_heads}, {name}": case(
            ([1, 1, 131], [90, 9, 160]), window=45, num_heads=heads, num_kv_heads=kv_heads, dtype=HALF[name]
        )
        for heads, kv_heads, name in ((1, 1, "fp16"), (3, 1, "bf16"), (8, 1, "bf16"), (14, 2, "fp16"))
    },
    **{
        f"{kv}, {heads} of {kv_heads}, blocks of {size}": case(
            MIXED, num_heads=heads, num_kv_heads=kv_heads, block_size=size, kv_dtype=KV_DTYPES[kv]
        )
        for kv in KV_DTYPES
        for heads, kv_heads, size in ((2, 2, 16), (8, 2, 64), (8, 1, 16))
    },
    **{
        f"{kv}, window {window}, {name}": case(
            FEW, window=window, head_dim=64, dtype=HALF[name], kv_dtype=KV_DTYPES[kv]
        )
        for kv in KV_DTYPES
        for name in HALF
        for window in (None, 19)
    },
    **{
        f"cascade, {heads} of {kv_heads}, {dtype}, {kv}": case(
            SHARING,
            shared_blocks=SHARED,
            block_size=64,
            num_heads=heads,
            num_kv_heads=kv_heads,
            group=heads // kv_heads,
            dtype=dtype,
            kv_dtype=kv,
        )
        for heads, kv_heads, dtype, kv in (
            (2, 1, torch.float32, torch.int8),
            (2, 1, torch.bfloat16, torch.int8),
            (5, 1, torch.bfloat16, None),
            (4, 2, torch.float16, None),
        )
    },
}


def poison(step: Step, plan: AttentionPlan) -> AttentionPlan:
    """Put NaN where no query of its row looks, and return a plan whose unused table entries point far away."""
    table_RB = plan.block_table_RB.clone()
    for row, context_len in enumerate(plan.context_lens):
        table_RB[row, -(-context_len // plan.block_size) :] = 2**30 if row % 2 else -(2**30)
        for position in range(plan.first_visible_key(row)):
            block = int(table_RB[row, position // plan.block_size])
            offset = position % plan.block_size
            if step.kv_pool_B2KPD.dtype in KV_DTYPES.values():
                scales_of(step.kv_pool_B2KPD)[block, :, :, offset] = NAN
            else:
                step.kv_pool_B2KPD[block, :, :, offset] = NAN
    return replace(plan, block_table_RB=table_RB)


@on_each_backend(CASES, usual=13)
def test_attention_is_the_references_and_reads_and_writes_nothing_else(
    backend_of: BackendOf, run: tuple[str, Case]
) -> None:
    """Queries are a view of a fused projection with rows beyond the step; whatever nothing may read is NaN."""
    name, given = run
    step, plan = given.step()
    assert bool(len(plan.shared_items_Y5)) == ("shared_blocks" in given.options)
    expected = step.expected(plan)
    plan = poison(step, plan)
    fused_TXD = torch.full((len(expected) + 3, 2 * step.q_TND.shape[1], step.q_TND.shape[2]), NAN)
    view_TND = fused_TXD.to(expected)[:, : step.q_TND.shape[1]]
    view_TND[: len(expected)] = step.q_TND
    out_TND = step.attend(backend_of(name), plan, view_TND)
    assert out_TND[len(expected) :].isnan().all()
    if expected.dtype == torch.float16 and "kv_dtype" in given.options:
        # A GPU multiplies weights and values of such a pool in bf16.
        assert_near(out_TND[: len(expected)].bfloat16(), expected.bfloat16())
    else:
        assert_near(out_TND[: len(expected)], expected)


def test_the_reference_sees_the_window_by_its_definition() -> None:
    """Query by query and key by key: i - window < j <= i."""
    step = make_step([1, 1, 7], [40, 3, 33])
    for window in (1, 2, 16, 30, 1000):
        plan, brute, token = step.plan.windowed(window), torch.empty_like(step.q_TND), 0
        for row, (query_len, context_len) in enumerate(zip(plan.query_lens, plan.context_lens, strict=True)):
            for i in range(context_len - query_len, context_len):
                seen = [j for j in range(context_len) if i - window < j <= i]
                kv_L2KD = torch.stack(
                    [step.kv_pool_B2KPD[plan.block_table_RB[row, j // 16], :, :, j % 16] for j in seen]
                )
                k_LND, v_LND = kv_L2KD.repeat_interleave(2, dim=2).unbind(1)
                weights_LN = torch.softmax((k_LND * step.q_TND[token]).sum(-1) * step.scale, dim=0)
                brute[token] = (weights_LN[..., None] * v_LND).sum(0)
                token += 1
        assert_near(step.expected(plan), brute)


def test_layers_may_take_turns_with_their_windows(backend: Backend) -> None:
    step = make_step([1, 20], [60, 50])
    narrow = step.plan.windowed(7)
    for plan in (step.plan, narrow, step.plan, narrow):
        assert_near(step.attend(backend, plan), step.expected(plan))


def test_a_split_decode_equals_an_unsplit_one(triton_backend: Backend) -> None:
    rows = ([1, 1, 1, 4], [600, 30, 257, 12])
    split, whole = (
        make_step(*rows, num_kv_heads=1, num_heads=2, target_programs=programs) for programs in (528, 1)
    )
    assert (split.plan.num_partials, whole.plan.num_partials) == (5, 0)
    out_TND = split.attend(triton_backend)
    assert_near(out_TND, split.expected())
    assert_near(whole.attend(triton_backend), out_TND)


def test_more_splits_than_one_merge_tile_holds(triton_backend: Backend) -> None:
    step = make_step([1], [17 * 256 + 1], num_heads=1, num_kv_heads=1, block_size=128)
    assert step.plan.num_partials > 16
    # The last key outweighs all before it, so that the second tile of splits has to rescale the first.
    last_slot = int(step.plan.slot_mapping_T[0])
    step.kv_pool_B2KPD[last_slot // 128, 0, 0, last_slot % 128] = step.q_TND[0, 0] * 2
    assert_near(step.attend(triton_backend), step.expected())


def test_a_split_without_keys_weighs_nothing(triton_backend: Backend) -> None:
    step = make_step([1], [300], num_heads=2, num_kv_heads=1)
    items = step.plan.decode_items_W6
    assert len(items) == 2
    with_empty = torch.cat((items[:1], items[:1], items[1:]))
    with_empty[:, 5] = torch.arange(3)
    with_empty[0, 4] = with_empty[0, 3]
    starts = torch.tensor([0, 3], dtype=torch.int32, device=items.device)
    plan = replace(step.plan, decode_items_W6=with_empty, partial_starts_D1=starts, num_partials=3)
    assert_near(step.attend(triton_backend, plan), step.expected())


@pytest.mark.parametrize("max_group_bytes", [1, 3 * 4096, 1 << 30])
def test_torch_groups_of_any_size_give_the_same_result(
    monkeypatch: pytest.MonkeyPatch, max_group_bytes: int
) -> None:
    monkeypatch.setattr(torch_attention, "MAX_GROUP_BYTES", max_group_bytes)
    step = make_step([1] * 7, [33, 40, 3, 48, 47, 36, 100])
    assert_near(step.attend(TorchBackend()), step.expected())


def test_a_step_without_rows_does_nothing(backend: Backend) -> None:
    assert make_step([], []).attend(backend).shape[0] == 0


def test_triton_refuses_what_torch_serves(triton_backend: Backend) -> None:
    """A head size that is no power of two, and a plan without the items that backends which walk rows do not read."""
    odd, step = make_step([1, 3], [20, 3], head_dim=48), make_step([1, 4], [20, 9])
    none = step.plan.decode_items_W6[:0]
    bare = replace(step.plan, has_items=False, decode_items_W6=none, prefill_items_X6=none)
    assert not TorchBackend().reads_items
    for refused, plan, told in ((odd, odd.plan, "powers of two"), (step, bare, "work items")):
        with pytest.raises(ValueError, match=told):
            refused.attend(triton_backend, plan)
        assert_near(refused.attend(TorchBackend(), plan), refused.expected())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_small_values_of_long_contexts_are_not_lost_in_fp16(backend: Backend, kv_dtype: torch.dtype) -> None:
    """A weight of 1/1000 times a scale of 1e-6 is 0 in fp16; the sum of a thousand such is not."""
    step = replace(make_step([1], [1000], head_dim=32, dtype=torch.float16, kv_dtype=kv_dtype), scale=1.0)
    scales_of(step.kv_pool_B2KPD)[:, 0] *= 0.0
    scales_of(step.kv_pool_B2KPD)[:, 1] *= 1e-4
    numbers_of(step.kv_pool_B2KPD).view(torch.uint8)[:, 1] = 0x78
    expected = step.expected()
    assert expected.abs().min() > 0
    torch.testing.assert_close(step.attend(backend), expected, rtol=2e-2, atol=0.0)


def test_deterministic_windows_are_the_references() -> None:
    for window in (1, 15, 16, 200, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 600):
        step = make_step([1, 1, 1, 5, 300], [1, 257, 700, 300, 620], num_heads=6, on=CPU)
        plan = step.plan.windowed(window)
        expected = step.expected(plan)
        assert_near(step.attend(DeterministicTorchBackend(), poison(step, plan)), expected)


@pytest.mark.parametrize("window", [1, 5, 100, CHUNK_TOKENS, CHUNK_TOKENS + 9])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2)])
def test_deterministic_windows_are_the_same_bits_however_the_prompt_is_cut(
    window: int, num_heads: int, num_kv_heads: int
) -> None:
    """Each chunk is in a step with a neighbour, whose blocks are the same in reverse."""
    backend, context_len = DeterministicTorchBackend(), 2 * CHUNK_TOKENS + 40
    whole = make_step([context_len], [context_len], num_heads=num_heads, num_kv_heads=num_kv_heads, on=CPU)
    plan = whole.plan.windowed(window)
    out_TND, table = whole.attend(backend, plan), plan.block_table_RB[0].tolist()
    begin = 0
    for query_len in (1, 2, 13, CHUNK_TOKENS - 1, 1, 77, 1, 1, CHUNK_TOKENS - 55):
        end, own_first = begin + query_len, query_len == 1
        chunk = small_plan(
            [query_len, 3] if own_first else [1, query_len],
            [end, 33] if own_first else [33, end],
            [table, table[::-1]] if own_first else [table[::-1], table],
            num_kv_heads=num_kv_heads,
        ).windowed(window)
        rows = slice(0, 1) if own_first else slice(1, 1 + query_len)
        q_TND = torch.zeros(sum(chunk.query_lens), num_heads, 16)
        q_TND[rows] = whole.q_TND[begin:end]
        assert torch.equal(whole.attend(backend, chunk, q_TND)[rows], out_TND[begin:end]), (begin, end)
        begin = end
    assert begin == context_len


def test_a_write_then_attention_sees_this_steps_keys(backend: Backend) -> None:
    step = make_step([1, 6], [20, 6])
    k_TKD = torch.randn(7, 2, 16, device=step.q_TND.device)
    backend.write_kv(k_TKD, k_TKD, step.kv_pool_B2KPD, step.plan)
    out_TND = step.attend(backend)
    assert_near(out_TND, step.attend(reference))
    # The first token of a prompt attends to itself alone: each head returns the value just written.
    assert_near(out_TND[1], k_TKD[1].repeat_interleave(2, dim=0))
