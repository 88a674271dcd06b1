"""Linears in int8: exact integer products, the error against the full product, and the cases without int8."""

from pathlib import Path
from typing import cast

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.int8_linear import can_quantise
from blockyard.kernels.interface import Backend
from blockyard.kernels.selection import choose_backend
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.properties import examples

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
PROPERTY = examples(60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def int8_backend(cpu_backend: Backend) -> Backend:
    library = cast(CpuBackend, cpu_backend)._library
    if not library.has_int8:
        pytest.skip("this CPU has neither AVX-512 VNNI nor AVX2")
    return CpuBackend(library, linears="int8")


def whole_numbers(rows: int, columns: int) -> torch.Tensor:
    """From -127 to 127, which is in each row: then its scale is 1, and nothing is rounded."""
    numbers = torch.randint(-127, 128, (rows, columns)).float()
    numbers[:, columns // 2] = 127
    return numbers


@PROPERTY
@given(
    rows=st.integers(0, 19),
    inputs=st.integers(1, 70).map(lambda quarter: 4 * quarter),
    outputs=st.integers(1, 11).map(lambda group: 16 * group),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_products_of_any_shape_are_exact_in_whole_numbers(
    int8_backend: Backend, rows: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x_TI, weight_OI = whole_numbers(rows, inputs), whole_numbers(outputs, inputs)
    bias_O = torch.randint(-1000, 1000, (outputs,)).to(dtype) if has_bias else None
    packed = int8_backend.pack_linear(weight_OI.to(dtype))
    assert packed.dtype == torch.int8
    actual = int8_backend.linear(x_TI.to(dtype), packed, bias_O)
    expected = x_TI @ weight_OI.t() + (0 if bias_O is None else bias_O.float())
    assert torch.equal(actual, expected.to(dtype))


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_whose_inverse_is_infinite_keep_their_sign(int8_backend: Backend, sign: int) -> None:
    x_TI = torch.full((3, 64), sign * 1e-38)
    weight = int8_backend.pack_linear(torch.ones(32, 64))
    torch.testing.assert_close(
        int8_backend.linear(x_TI, weight), torch.full((3, 32), sign * 64e-38), atol=0, rtol=0.05
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_about_one_percent(int8_backend: Backend, dtype: torch.dtype) -> None:
    x_TI, weight_OI = torch.randn(33, 1024).to(dtype), torch.randn(256, 1024).to(dtype) * 0.02
    exact = x_TI.float() @ weight_OI.float().t()
    error = int8_backend.linear(x_TI, int8_backend.pack_linear(weight_OI)).float() - exact
    assert float(error.norm() / exact.norm()) < 0.015


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_the_same_bits_whoever_stands_beside_it(int8_backend: Backend, dtype: torch.dtype) -> None:
    x_TI, packed = torch.randn(23, 512).to(dtype), int8_backend.pack_linear(torch.randn(592, 512).to(dtype))
    x_TI[3] *= 1000
    together = int8_backend.linear(x_TI, packed)
    for row in range(len(x_TI)):
        assert torch.equal(int8_backend.linear(x_TI[row : row + 1], packed)[0], together[row])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_fails_its_own_token_alone(int8_backend: Backend, value: float) -> None:
    x_TI = torch.randn(5, 64)
    x_TI[2, 17] = value
    result = int8_backend.linear(x_TI, int8_backend.pack_linear(torch.randn(32, 64)))
    assert result[2].isnan().all()
    assert result[[0, 1, 3, 4]].isfinite().all()


def test_a_token_or_an_output_of_zeros_gives_the_bias(int8_backend: Backend) -> None:
    x_TI, weight_OI, bias_O = torch.randn(2, 64), torch.randn(32, 64), torch.randn(32)
    x_TI[0], weight_OI[5] = 0.0, 0.0
    result = int8_backend.linear(x_TI, int8_backend.pack_linear(weight_OI), bias_O)
    assert torch.equal(result[0], bias_O)
    assert result[1, 5] == bias_O[5]


def test_other_shapes_and_types_keep_their_linears(int8_backend: Backend) -> None:
    assert can_quantise(torch.zeros(32, 64))
    for weight_OI in (torch.zeros(31, 64), torch.zeros(32, 64).half()):
        assert int8_backend.pack_linear(weight_OI) is weight_OI
    assert int8_backend.pack_linear(torch.zeros(32, 62)).dtype == torch.float32


def test_who_cannot_have_them_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not for deterministic mode"):
        choose_backend(CPU, linears="int8", deterministic=True)
    with pytest.raises(ValueError, match="not for backend 'torch' on cpu"):
        choose_backend(CPU, linears="int8", requested="torch")
    with pytest.raises(ValueError, match="not for backend 'auto' on cuda"):
        choose_backend(torch.device("cuda"), linears="int8")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="the cpu backend is unavailable"):
        choose_backend(CPU, linears="int8")
