"""The C++ kernels against the reference, over every supported shape, and the cases that they leave to PyTorch.

The tests of all backends (attention, windows, cache, elementwise) run on them too, at fixed shapes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from blockyard.kernels.cpu.backend import MAX_HEAD_DIM, from_native, has_native_layout, to_native
from blockyard.kernels.interface import Backend, HeadNorms
from blockyard.kernels.torch import reference
from blockyard.kernels.torch.nucleus import thresholds_by_sorting
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from tests.properties import examples

AssertNear = Callable[[torch.Tensor, torch.Tensor], None]
MakeStep = Callable[..., Any]
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6
# The fixtures that each example shares hold no state.
PROPERTY = examples(
    60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Query lengths, decodes first, and context lengths: whole prompts, chunks of prompts and decodes."""
    decodes = draw(st.lists(st.integers(1, 200), max_size=4))
    chunks = draw(st.lists(st.tuples(st.integers(2, 70), st.integers(0, 150)), max_size=3))
    assume(decodes or chunks)
    return [1] * len(decodes) + [new for new, _ in chunks], decodes + [new + before for new, before in chunks]


SHAPES: dict[str, st.SearchStrategy[Any]] = {
    "group": st.integers(1, 8),
    "num_kv_heads": st.integers(1, 3),
    "head_dim": st.sampled_from([16, 32, 48, 64, 80, 96, 128]),
    "block_size": st.sampled_from([16, 32, 64, 128]),
    "dtype": st.sampled_from(DTYPES),
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@PROPERTY
@given(
    rows=rows(),
    window=st.none() | st.integers(1, 200),
    kv_dtype=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    **SHAPES,
)
def test_attention_of_any_shape_matches_the_reference(
    cpu_backend: Backend,
    make_step: MakeStep,
    assert_near: AssertNear,
    rows: tuple[list[int], list[int]],
    window: int | None,
    group: int,
    num_kv_heads: int,
    **shape: Any,
) -> None:
    step = make_step(*rows, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, **shape)
    plan = step.plan if window is None else step.plan.windowed(window)
    expected = torch.full_like(step.out_TND, float("nan"))
    reference.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=expected)
    cpu_backend.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=step.out_TND)
    assert_near(step.out_TND, expected)


@PROPERTY
@given(rows=rows(), normalises=st.booleans(), rounds_once=st.booleans(), padding=st.integers(0, 3), **SHAPES)
def test_heads_are_normalised_rotated_and_stored_as_one_by_one(
    cpu_backend: Backend,
    make_step: MakeStep,
    assert_near: AssertNear,
    rows: tuple[list[int], list[int]],
    normalises: bool,
    rounds_once: bool,
    padding: int,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    **shape: Any,
) -> None:
    num_heads, dtype = group * num_kv_heads, shape["dtype"]
    num_tokens = sum(rows[0]) + padding
    shape |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    step = make_step(*rows, padded_tokens=num_tokens, **shape)
    heads_TXD = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    weights = torch.rand(2, head_dim).to(torch.float32 if rounds_once else dtype)
    norms = HeadNorms(q_weight_D=weights[0], k_weight_D=weights[1], eps=EPS)
    angles = torch.outer(torch.arange(300.0), torch.rand(head_dim // 2))
    cos_sin_SD = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q_TND, k_TKD, v_TKD = heads_TXD.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if normalises:
        for heads, weight_D in ((q_TND, norms.q_weight_D), (k_TKD, norms.k_weight_D)):
            normed = torch.empty_like(heads.flatten(0, 1))
            reference.rms_norm(heads.flatten(0, 1), weight_D, EPS, out_TH=normed)
            heads.copy_(normed.view(heads.shape))
    expected = torch.full_like(step.kv_pool_B2KPD, float("nan"))
    reference.rotary(q_TND, k_TKD, cos_sin_SD, step.plan.positions_T)
    reference.write_kv(k_TKD, v_TKD, expected, step.plan)
    pool = torch.full_like(expected, float("nan"))
    result = cpu_backend.qk_norm_rope_write(
        heads_TXD, norms if normalises else None, cos_sin_SD, pool, step.plan
    )
    assert_near(result, q_TND)
    assert torch.equal(pool.isnan(), expected.isnan())
    assert_near(pool.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_alone_in_a_batch_and_by_any_number_of_threads(
    cpu_backend: Backend, make_step: MakeStep, threads: int, dtype: torch.dtype
) -> None:
    step = make_step([1, 1, 40], [70, 300, 131], num_heads=6, head_dim=64, dtype=dtype)
    cpu_backend.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=step.out_TND)
    torch.set_num_threads(1)
    alone = make_step([40], [131], num_heads=6, head_dim=64, dtype=dtype)
    table_RB = step.plan.block_table_RB[2:, : alone.plan.block_table_RB.shape[1]].contiguous()
    plan = replace(alone.plan, block_table_RB=table_RB)
    cpu_backend.attention(step.q_TND[2:], step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=alone.out_TND)
    assert torch.equal(step.out_TND[2:], alone.out_TND)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [0, 1])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    cpu_backend: Backend, make_step: MakeStep, dtype: torch.dtype, kind: int
) -> None:
    """Not to be optimised away: a sequence whose keys or values are NaN fails by it, and only that sequence."""
    step = make_step([1, 1, 6], [40, 33, 20], dtype=dtype)
    block = int(step.plan.block_table_RB[1, 1])
    step.kv_pool_B2KPD[block, kind, :, 3] = float("nan")
    cpu_backend.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=step.out_TND)
    assert step.out_TND[1].isnan().all()
    assert not step.out_TND[[0, *range(2, 8)]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_small_scores_neither_overflow_nor_lose_the_likeliest_key(
    cpu_backend: Backend, make_step: MakeStep, assert_near: AssertNear, dtype: torch.dtype
) -> None:
    step = make_step([1, 9], [150, 90], head_dim=32, dtype=dtype)
    q_TND = step.q_TND * 300
    expected = torch.empty_like(step.out_TND)
    reference.attention(q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=expected)
    cpu_backend.attention(q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=step.out_TND)
    torch.testing.assert_close(step.out_TND, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(40, torch.float32), (MAX_HEAD_DIM + 16, torch.float32), (64, torch.float16)],
)
def test_what_the_kernels_do_not_take_is_served_by_torch(
    cpu_backend: Backend, make_step: MakeStep, assert_near: AssertNear, head_dim: int, dtype: torch.dtype
) -> None:
    step = make_step([1, 5], [20, 9], head_dim=head_dim, dtype=dtype)
    assert not has_native_layout(step.kv_pool_B2KPD, dtype)
    k_TKD = torch.randn(6, 2, head_dim).to(dtype)
    cpu_backend.write_kv(k_TKD, k_TKD, step.kv_pool_B2KPD, step.plan)
    expected = torch.empty_like(step.out_TND)
    reference.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=expected)
    cpu_backend.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=step.out_TND)
    assert_near(step.out_TND, expected)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 87.0, -87.0, 89.0, -89.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul"])
def test_an_activation_of_any_size(
    cpu_backend: Backend, assert_near: AssertNear, value: float, dtype: torch.dtype, op: str
) -> None:
    gate_up_T2I = torch.tensor([[value, value, 1.0, 1.0]], dtype=dtype)
    out_TI, expected = torch.empty(1, 2, dtype=dtype), torch.empty(1, 2, dtype=dtype)
    getattr(cpu_backend, op)(gate_up_T2I, out_TI=out_TI)
    getattr(reference, op)(gate_up_T2I, out_TI=expected)
    assert_near(out_TI, expected)


def test_many_rows_are_shared_among_threads(
    cpu_backend: Backend, assert_near: AssertNear, threads: int
) -> None:
    x_TH, weight_H = torch.randn(300, 260), torch.rand(260)
    out_TH, expected = torch.empty_like(x_TH), torch.empty_like(x_TH)
    cpu_backend.rms_norm(x_TH, weight_H, EPS, out_TH=out_TH)
    reference.rms_norm(x_TH, weight_H, EPS, out_TH=expected)
    assert_near(out_TH, expected)


def test_bf16_is_rounded_to_the_nearest_even_and_nan_stays_nan(cpu_backend: Backend) -> None:
    """Numbers of every size and bit pattern. The vector units' own rounding flushes what is below 2^-126 to 0."""
    bits = torch.randint(-(2**31), 2**31, (64, 1024), dtype=torch.int64).to(torch.int32)
    x_TH = bits.view(torch.float32).to(torch.bfloat16)
    out_TI = torch.empty(64, 512, dtype=torch.bfloat16)
    gate_T2I = torch.cat((torch.full((64, 512), 1.0, dtype=torch.bfloat16), x_TH[:, :512]), dim=1)
    cpu_backend.silu_mul(gate_T2I, out_TI=out_TI)
    expected = (torch.sigmoid(torch.ones(())) * x_TH[:, :512].float()).to(torch.bfloat16)
    assert torch.equal(out_TI.isnan(), expected.isnan())
    torch.testing.assert_close(out_TI, expected, rtol=2**-7, atol=2.0**-126, equal_nan=True)


def test_the_layout_of_a_pool_is_only_another_order(cpu_backend: Backend) -> None:
    pool = torch.randn(3, 2, 2, 64, 48)
    native = to_native(pool, pool.dtype)
    assert torch.equal(from_native(native, pool.dtype), pool)
    assert torch.equal(native[:, 1], pool[:, 1])
    # Dimension 5 of the keys 16 to 31 of a head lies in one piece.
    assert torch.equal(native[2, 0, 1].flatten()[(48 + 5) * 16 :][:16], pool[2, 0, 1, 16:32, 5])
    assert not has_native_layout(pool.half(), torch.float16)


def test_bf16_lies_by_pairs_of_dimensions_and_of_values(cpu_backend: Backend) -> None:
    pool = torch.randn(3, 2, 2, 64, 48).bfloat16()
    native = to_native(pool, pool.dtype)
    assert torch.equal(from_native(native, pool.dtype), pool)
    # Dimensions 6 and 7 of the keys 16 to 31, and the values 10 and 11.
    keys = native[2, 0, 1].flatten()[(48 + 6) * 16 :][:32].view(16, 2)
    assert torch.equal(keys, pool[2, 0, 1, 16:32, 6:8])
    assert torch.equal(native[2, 1, 1, 10:12].reshape(48, 2), pool[2, 1, 1, 10:12].t())


def test_a_pool_of_another_shape_is_refused(cpu_backend: Backend, make_step: MakeStep) -> None:
    step = make_step([1], [5])
    with pytest.raises(ValueError, match="does not hold 4 kv heads"):
        cpu_backend.write_kv(torch.zeros(1, 4, 16), torch.zeros(1, 4, 16), step.kv_pool_B2KPD, step.plan)


@PROPERTY
@given(
    rows=st.integers(0, 5),
    vocab_size=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    spoilt=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    data=st.data(),
)
def test_the_likeliest_token_is_the_first_of_the_largest_and_what_is_not_finite_is_told(
    cpu_backend: Backend, rows: int, vocab_size: int, dtype: torch.dtype, spoilt: float, data: st.DataObject
) -> None:
    logits_SV = torch.randint(-4, 4, (rows, vocab_size + 3)).to(dtype)[:, :vocab_size]  # many are equal
    tokens_S, is_finite_S = cpu_backend.greedy_tokens(logits_SV)
    assert is_finite_S.all()
    for row, token in enumerate(tokens_S.tolist()):
        values = logits_SV[row].tolist()
        assert token == values.index(max(values))
    if rows:
        row, place = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, vocab_size - 1))
        logits_SV[row, place] = spoilt
        tokens_S, is_finite_S = cpu_backend.greedy_tokens(logits_SV)
        assert is_finite_S.tolist() == [index != row for index in range(rows)]
        assert ((tokens_S >= 0) & (tokens_S < vocab_size)).all()


@PROPERTY
@given(
    counts=st.lists(st.integers(0, 2**10), min_size=1, max_size=300),
    exponent=st.integers(-40, -10),
    top_k=st.integers(1, 400),
    share=st.integers(1, 256),
)
def test_a_nucleus_is_what_a_sort_says(
    cpu_backend: Backend, counts: list[int], exponent: int, top_k: int, share: int
) -> None:
    """All sums are exact in fp64 here, and many weights are equal."""
    weights_FV = torch.tensor([counts], dtype=torch.float32) * 2.0**exponent
    limits = torch.tensor([min(top_k, len(counts))]), torch.tensor([share / 256], dtype=torch.float64)
    found_F, expected_F = torch.full((1,), float("nan")), torch.zeros(1)
    every_F = torch.ones(1, dtype=torch.bool)
    cpu_backend.top_k_top_p_thresholds(weights_FV, *limits, every_F, found_F)
    thresholds_by_sorting(weights_FV, *limits, every_F, expected_F)
    assert found_F.tolist() == expected_F.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_are_impossible_are_not_the_likeliest(cpu_backend: Backend, dtype: torch.dtype) -> None:
    logits_SV = torch.full((2, 40), -float("inf"), dtype=dtype)
    logits_SV[0, 37] = -5000.0
    tokens_S, is_finite_S = cpu_backend.greedy_tokens(logits_SV)
    assert tokens_S[0] == 37
    assert not is_finite_S.any()
