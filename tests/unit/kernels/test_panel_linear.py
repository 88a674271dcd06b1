"""Linears on panels of 64 outputs: exact for whole numbers, equal in any batch, and only for shapes that fit."""

from pathlib import Path
from typing import cast

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.native_linear import LANES
from blockyard.kernels.cpu.panel_linear import can_lay_out, lay_out
from blockyard.kernels.interface import Backend
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.properties import examples

DTYPES = [torch.float32, torch.bfloat16]
PROPERTY = examples(60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def panels(cpu_backend: Backend) -> CpuBackend:
    backend = cast(CpuBackend, cpu_backend)
    if not backend._library.has_linear(is_bf16=False):
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    return backend


@PROPERTY
@given(
    rows=st.one_of(st.integers(0, 40), st.integers(500, 530)),
    inputs=st.integers(1, 300).map(lambda pair: 2 * pair),
    outputs=st.integers(1, 20).map(lambda group: LANES * group),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_products_of_any_shape_are_exact_in_whole_numbers(
    panels: CpuBackend, rows: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """Also bf16 where this CPU's oneDNN would be asked for it."""
    x_TI = torch.randint(-8, 9, (rows, inputs)).to(dtype)
    weight_OI = torch.randint(-8, 9, (outputs, inputs)).to(dtype)
    bias_O = torch.randint(-100, 101, (outputs,)).to(dtype) if has_bias else None
    actual = panels.linear(x_TI, lay_out(weight_OI), bias_O)
    expected = x_TI.float() @ weight_OI.float().t() + (0 if bias_O is None else bias_O.float())
    assert torch.equal(actual, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_the_same_bits_whoever_stands_beside_it(panels: CpuBackend, dtype: torch.dtype) -> None:
    # Large enough for several threads, which share many rows of so few outputs by rows too.
    x_TI, weight = torch.randn(200, 1400).to(dtype), lay_out(torch.randn(192, 1400).to(dtype))
    together = panels.linear(x_TI, weight)
    for rows in (1, 2, 5, 7, 13, 20, 31, 97, 150):
        for first in (0, 200 - rows):
            alone = panels.linear(x_TI[first : first + rows], weight)
            assert torch.equal(alone, together[first : first + rows])


@pytest.mark.parametrize("rows", [0, 1, 7, 40, 530])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_a_large_weight(panels: CpuBackend, dtype: torch.dtype, rows: int) -> None:
    x_TI = torch.randint(-8, 9, (rows, 1000)).to(dtype)
    weight_OI = torch.randint(-8, 9, (960, 1000)).to(dtype)
    expected = (x_TI.float() @ weight_OI.float().t()).to(dtype)
    before = torch.get_num_threads()
    try:
        for threads in (2, 1, 3, 16):
            torch.set_num_threads(threads)
            assert torch.equal(panels.linear(x_TI, lay_out(weight_OI)), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(panels: CpuBackend, dtype: torch.dtype) -> None:
    wide, weight_OI = torch.randint(-8, 9, (9, 301)).to(dtype), torch.randint(-8, 9, (128, 260)).to(dtype)
    expected = wide[:, 17:277].float() @ weight_OI.float().t()
    assert torch.equal(panels.linear(wide[:, 17:277], lay_out(weight_OI)), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_fails_its_own_token_alone(
    panels: CpuBackend, value: float, dtype: torch.dtype
) -> None:
    x_TI = torch.randn(7, 64, dtype=dtype)
    x_TI[2, 17] = value
    result = panels.linear(x_TI, lay_out(torch.randn(64, 64, dtype=dtype)))
    assert not result[2].isfinite().any()
    assert result[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_weights_of_whole_groups_are_laid_out_and_others_left_to_onednn(panels: CpuBackend) -> None:
    assert panels.pack_linear(torch.zeros(512, 512)).shape == (32, 512, 16)
    for weight_OI in (torch.zeros(500, 512), torch.zeros(512, 501)):
        assert not can_lay_out(panels._library, weight_OI)
        assert panels.pack_linear(weight_OI).dim() == 2
    assert not can_lay_out(panels._library, torch.zeros(512, 512, dtype=torch.float16))
    assert not can_lay_out(panels._library, torch.zeros(512, 512, device="meta"))
    packed = panels.pack_linear(torch.zeros(512, 512, dtype=torch.bfloat16))
    multiplies_tiles = "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    assert packed.shape == ((512, 512) if multiplies_tiles else (32, 256, 16, 2))


def test_what_does_not_fit_is_refused(panels: CpuBackend) -> None:
    weight = lay_out(torch.zeros(128, 256))
    half = lay_out(torch.zeros(128, 256, dtype=torch.bfloat16))
    for laid_out, x_TI, bias_O, told in (
        (weight, torch.zeros(3, 254), None, "for 254 inputs"),
        (weight, torch.zeros(3, 256, dtype=torch.bfloat16), None, "inputs in torch.bfloat16"),
        (half, torch.zeros(3, 255, dtype=torch.bfloat16), None, "for 255 inputs"),
        (half, torch.zeros(3, 257, dtype=torch.bfloat16), None, "for 257 inputs"),
        (lay_out(torch.zeros(80, 256)).clone(), torch.zeros(3, 256), None, "a weight"),
        (lay_out(torch.zeros(64, 256))[1:], torch.zeros(3, 256), None, "a weight"),
        (lay_out(torch.zeros(128, 512))[:, :256], torch.zeros(3, 256), None, "in pieces"),
        (weight.half(), torch.zeros(3, 256, dtype=torch.float16), None, "a weight"),
        (weight, torch.zeros(256, 3).t(), None, "not in rows"),
        (weight, torch.zeros(3, 256, device="meta"), None, "another memory"),
        (weight, torch.zeros(3, 256), torch.zeros(127), "a bias that is not 128"),
        (weight, torch.zeros(3, 256), torch.zeros(128, dtype=torch.bfloat16), "a bias that is not 128"),
    ):
        with pytest.raises(ValueError, match=told):
            panels.linear(x_TI, laid_out, bias_O)
