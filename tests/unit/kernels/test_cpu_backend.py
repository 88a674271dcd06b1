"""The C++ kernels against the reference, over every supported shape, and the cases that they leave to PyTorch.

The tests of all backends (attention, cache, elementwise) run on them too, at fixed shapes.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from blockyard.kernels.cpu.backend import MAX_HEAD_DIM, CpuBackend, from_native, has_native_layout, to_native
from blockyard.kernels.torch import reference
from blockyard.kernels.torch.nucleus import thresholds_by_sorting
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from tests.properties import examples

from .rig import EPS, KV_DTYPES, NAN, assert_near, make_step, placed_heads, with_threads

DTYPES = [torch.float32, torch.bfloat16]
PROPERTY = examples(60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Query lengths, decodes first, and context lengths: whole prompts, chunks of prompts and decodes."""
    decodes = draw(st.lists(st.integers(1, 150), max_size=3))
    chunks = draw(st.lists(st.tuples(st.integers(2, 70), st.integers(0, 80)), max_size=2))
    assume(decodes or chunks)
    return [1] * len(decodes) + [new for new, _ in chunks], decodes + [new + before for new, before in chunks]


SHAPES = st.fixed_dictionaries(
    {
        "group": st.integers(1, 8),
        "num_kv_heads": st.integers(1, 3),
        "head_dim": st.sampled_from([16, 32, 48, 64, 80, 96, 128]),
        "block_size": st.sampled_from([16, 32, 64, 128]),
        "dtype": st.sampled_from(DTYPES),
    }
).map(lambda shape: {"num_heads": shape.pop("group") * shape["num_kv_heads"], **shape})


@PROPERTY
@given(
    rows=rows(),
    window=st.none() | st.integers(1, 200),
    kv_dtype=st.sampled_from([None, *KV_DTYPES.values()]),
    shape=SHAPES,
)
def test_attention_of_any_shape_matches_the_reference(
    cpu_backend: CpuBackend,
    rows: tuple[list[int], list[int]],
    window: int | None,
    kv_dtype: torch.dtype | None,
    shape: dict[str, Any],
) -> None:
    step = make_step(*rows, kv_dtype=kv_dtype, **shape)
    plan = step.plan if window is None else step.plan.windowed(window)
    assert_near(step.attend(cpu_backend, plan), step.expected(plan))


@PROPERTY
@given(
    rows=rows(), norms=st.sampled_from([None, "as heads", "fp32"]), padding=st.integers(0, 3), shape=SHAPES
)
def test_heads_are_normalised_rotated_and_stored_as_one_by_one(
    cpu_backend: CpuBackend,
    rows: tuple[list[int], list[int]],
    norms: str | None,
    padding: int,
    shape: dict[str, Any],
) -> None:
    step = make_step(*rows, padded_tokens=sum(rows[0]) + padding, **shape)
    placed = placed_heads(step, {None: None, "as heads": shape["dtype"], "fp32": torch.float32}[norms])
    pool, expected = (torch.full_like(step.kv_pool_B2KPD, NAN) for _ in range(2))
    reference.write_kv(placed.k_TKD, placed.v_TKD, expected, step.plan)
    assert_near(placed.by(cpu_backend, pool), placed.q_TND)
    assert_near(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_alone_in_a_batch_and_by_any_number_of_threads(
    cpu_backend: CpuBackend, dtype: torch.dtype
) -> None:
    step = make_step([1, 1, 40], [70, 300, 131], num_heads=6, head_dim=64, dtype=dtype)
    alone = make_step([40], [131], num_heads=6, head_dim=64, dtype=dtype).plan
    table_RB = step.plan.block_table_RB[2:, : alone.block_table_RB.shape[1]].contiguous()
    alone = replace(alone, block_table_RB=table_RB)
    own = with_threads(1, lambda: step.attend(cpu_backend, alone, step.q_TND[2:]))
    for threads in (1, 2):
        assert torch.equal(with_threads(threads, lambda: step.attend(cpu_backend))[2:], own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [0, 1])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    cpu_backend: CpuBackend, dtype: torch.dtype, kind: int
) -> None:
    """Not to be optimised away: a sequence whose keys or values are NaN fails by it, and only that sequence."""
    step = make_step([1, 1, 6], [40, 33, 20], dtype=dtype)
    step.kv_pool_B2KPD[int(step.plan.block_table_RB[1, 1]), kind, :, 3] = NAN
    # Position 19 of the second row lies there.
    is_nan_T = step.attend(cpu_backend).isnan().flatten(1)
    assert is_nan_T.all(dim=1).tolist() == is_nan_T.any(dim=1).tolist() == [row == 1 for row in range(8)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_small_scores_neither_overflow_nor_lose_the_likeliest_key(
    cpu_backend: CpuBackend, dtype: torch.dtype
) -> None:
    step = make_step([1, 9], [150, 90], head_dim=32, dtype=dtype)
    q_TND = step.q_TND * 300
    assert_near(step.attend(cpu_backend, None, q_TND), step.expected(None, q_TND), 2e-2)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(40, torch.float32), (MAX_HEAD_DIM + 16, torch.float32), (64, torch.float16)]
)
def test_what_the_kernels_do_not_take_is_served_by_torch(
    cpu_backend: CpuBackend, head_dim: int, dtype: torch.dtype
) -> None:
    step = make_step([1, 5], [20, 9], head_dim=head_dim, dtype=dtype)
    assert not has_native_layout(step.kv_pool_B2KPD, dtype)
    k_TKD = torch.randn(6, 2, head_dim).to(dtype)
    cpu_backend.write_kv(k_TKD, k_TKD, step.kv_pool_B2KPD, step.plan)
    assert_near(step.attend(cpu_backend), step.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul"])
def test_an_activation_of_any_size(cpu_backend: CpuBackend, dtype: torch.dtype, op: str) -> None:
    for value in (0.0, -0.0, 1e-30, 87.0, -87.0, 89.0, -89.0, 1e4, -1e4):
        gate_up_T2I = torch.tensor([[value, value, 1.0, 1.0]], dtype=dtype)
        out_TI, expected = torch.empty(1, 2, dtype=dtype), torch.empty(1, 2, dtype=dtype)
        getattr(cpu_backend, op)(gate_up_T2I, out_TI=out_TI)
        getattr(reference, op)(gate_up_T2I, out_TI=expected)
        assert_near(out_TI, expected)


def test_many_rows_are_shared_among_threads(cpu_backend: CpuBackend) -> None:
    x_TH, weight_H = torch.randn(300, 260), torch.rand(260)
    expected = torch.empty_like(x_TH)
    reference.rms_norm(x_TH, weight_H, EPS, out_TH=expected)
    for threads in (1, 2):
        out_TH = torch.full_like(x_TH, NAN)
        with_threads(threads, lambda out_TH=out_TH: cpu_backend.rms_norm(x_TH, weight_H, EPS, out_TH=out_TH))
        assert_near(out_TH, expected)


def test_bf16_is_rounded_to_the_nearest_even_and_nan_stays_nan(cpu_backend: CpuBackend) -> None:
    """Numbers of every size and bit pattern. The vector units' own rounding flushes what is below 2^-126 to 0."""
    bits = torch.randint(-(2**31), 2**31, (64, 1024), dtype=torch.int64).to(torch.int32)
    x_TH = bits.view(torch.float32).to(torch.bfloat16)
    out_TI = torch.empty(64, 512, dtype=torch.bfloat16)
    gate_T2I = torch.cat((torch.full((64, 512), 1.0, dtype=torch.bfloat16), x_TH[:, :512]), dim=1)
    cpu_backend.silu_mul(gate_T2I, out_TI=out_TI)
    expected = (torch.sigmoid(torch.ones(())) * x_TH[:, :512].float()).to(torch.bfloat16)
    assert torch.equal(out_TI.isnan(), expected.isnan())
    torch.testing.assert_close(out_TI, expected, rtol=2**-7, atol=2.0**-126, equal_nan=True)


def test_the_layout_of_a_pool_is_only_another_order(cpu_backend: CpuBackend) -> None:
    """In fp32 16 keys lie side by side. In bf16 dimensions lie by pairs, and so do values."""
    plain = torch.randn(3, 2, 2, 64, 48)
    half = plain.bfloat16()
    of_plain, of_half = to_native(plain, plain.dtype), to_native(half, half.dtype)
    assert torch.equal(from_native(of_plain, plain.dtype), plain)
    assert torch.equal(from_native(of_half, half.dtype), half)
    assert torch.equal(of_plain[:, 1], plain[:, 1])
    # Dimension 5 of the keys 16 to 31 of a head, dimensions 6 and 7 of them, and the values 10 and 11.
    assert torch.equal(of_plain[2, 0, 1].flatten()[(48 + 5) * 16 :][:16], plain[2, 0, 1, 16:32, 5])
    keys = of_half[2, 0, 1].flatten()[(48 + 6) * 16 :][:32].view(16, 2)
    assert torch.equal(keys, half[2, 0, 1, 16:32, 6:8])
    assert torch.equal(of_half[2, 1, 1, 10:12].reshape(48, 2), half[2, 1, 1, 10:12].t())
    assert not has_native_layout(plain.half(), torch.float16)


@PROPERTY
@given(
    rows=st.integers(0, 5),
    vocab_size=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    spoilt=st.sampled_from([NAN, float("inf"), -float("inf")]),
    data=st.data(),
)
def test_the_likeliest_token_is_the_first_of_the_largest_and_what_is_not_finite_is_told(
    cpu_backend: CpuBackend,
    rows: int,
    vocab_size: int,
    dtype: torch.dtype,
    spoilt: float,
    data: st.DataObject,
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
    cpu_backend: CpuBackend, counts: list[int], exponent: int, top_k: int, share: int
) -> None:
    """All sums are exact in fp64 here, and many weights are equal."""
    weights_FV = torch.tensor([counts], dtype=torch.float32) * 2.0**exponent
    limits = torch.tensor([min(top_k, len(counts))]), torch.tensor([share / 256], dtype=torch.float64)
    found_F, expected_F, every_F = torch.full((1,), NAN), torch.zeros(1), torch.ones(1, dtype=torch.bool)
    cpu_backend.top_k_top_p_thresholds(weights_FV, *limits, every_F, found_F)
    thresholds_by_sorting(weights_FV, *limits, every_F, expected_F)
    assert found_F.tolist() == expected_F.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_are_impossible_are_not_the_likeliest(
    cpu_backend: CpuBackend, dtype: torch.dtype
) -> None:
    logits_SV = torch.full((2, 40), -float("inf"), dtype=dtype)
    logits_SV[0, 37] = -5000.0
    tokens_S, is_finite_S = cpu_backend.greedy_tokens(logits_SV)
    assert tokens_S[0] == 37
    assert not is_finite_S.any()
