"""Linears with weights of 4 and 8 bits in groups, in C++: the product of the dequantised weight, for every layout."""

from dataclasses import replace
from typing import cast

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.grouped_linear import GroupedWeight
from blockyard.kernels.interface import Backend
from blockyard.kernels.quantised import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    LinearWeight,
    QuantisedWeight,
    dequantised,
    packed,
)
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.properties import examples

DTYPES = [torch.float32, torch.bfloat16]
PROPERTY = examples(60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def backend(cpu_backend: Backend) -> Backend:
    if not cast(CpuBackend, cpu_backend).library.has_int8:
        pytest.skip("this CPU has neither AVX-512 VNNI nor AVX2")
    return cpu_backend


def draw(
    outputs: int, groups: int, size: int, bits: int, *, has_order: bool = False, has_zeros: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Int4Weight | Int8Weight:  # fmt: skip
    inputs = groups * size
    numbers_OI = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    zero_OG = torch.randint(0, 1 << bits, (outputs, groups), dtype=torch.uint8)
    scale_OG = torch.rand(outputs, groups) / 100
    order_I = torch.randperm(inputs).int() if has_order else None
    if bits == 4:
        return Int4Weight(
            packed_OI=packed(numbers_OI),
            scale_OG=scale_OG,
            zero_OG=zero_OG if has_zeros else torch.full_like(zero_OG, 8),
            group_size=size,
            order_I=order_I,
            dtype=dtype,
        )
    return Int8Weight(
        weight_OI=numbers_OI.view(torch.int8),
        scale_OG=scale_OG,
        zero_OG=zero_OG.view(torch.int8) if has_zeros else None,
        group_size=size,
        order_I=order_I,
        dtype=dtype,
    )


def backend_for(backend: Backend, input_bits: int) -> CpuBackend:
    """Return the backend that rounds inputs to so many bits."""
    library = cast(CpuBackend, backend).library
    return CpuBackend(library, linears="int8") if input_bits == 8 else CpuBackend(library)


def pack(backend: Backend, weight: QuantisedWeight) -> LinearWeight:
    result = backend.pack_linear(weight)
    assert isinstance(result, GroupedWeight)
    return result


@PROPERTY
@given(
    rows=st.integers(0, 11),
    groups=st.integers(1, 4),
    size=st.integers(1, 40).map(lambda eighth: 8 * eighth),
    outputs=st.integers(1, 6).map(lambda group: 16 * group),
    bits=st.sampled_from([4, 8]),
    input_bits=st.sampled_from([8, 16]),
    has_order=st.booleans(),
    has_zeros=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_products_of_any_shape_are_those_of_the_dequantised_weight(
    backend: Backend, rows: int, groups: int, size: int, outputs: int, bits: int, input_bits: int,
    has_order: bool, has_zeros: bool, has_bias: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    backend = backend_for(backend, input_bits)
    weight = draw(outputs, groups, size, bits, has_order=has_order, has_zeros=has_zeros, dtype=dtype)
    x_TI = torch.randn(rows, groups * size).to(dtype)
    bias_O = torch.randn(outputs).to(dtype) if has_bias else None
    actual = backend.linear(x_TI, pack(backend, weight), bias_O)
    assert actual.dtype == dtype
    exact_OI = dequantised(replace(weight, dtype=torch.float32)).double()
    expected = x_TI.double() @ exact_OI.t() + (0 if bias_O is None else bias_O.double())
    # Inputs are off by half a step of the largest in their chunk.
    error = (actual.double() - expected).abs()
    inputs_error = (
        0.5
        / (127 * 256 if input_bits == 16 else 127)
        * x_TI.double().abs().amax(1, keepdim=True)
        * exact_OI.abs().sum(1)
    )
    rounding = torch.finfo(dtype).eps * expected.abs() + 1e-5
    assert bool((error <= inputs_error + rounding).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_whole_numbers_are_exact(backend: Backend, bits: int) -> None:
    """With 16 bits an input from -32512 to 32512 is not rounded, and sums of a chunk are integers."""
    weight = replace(draw(64, 3, 128, bits), scale_OG=torch.ones(64, 3))
    x_TI = torch.randint(-32512, 32513, (5, 384)).float()
    x_TI[:, ::128] = 32512
    expected = (x_TI.double() @ dequantised(weight).double().t()).float()
    torch.testing.assert_close(backend.linear(x_TI, pack(backend, weight)), expected, atol=16, rtol=3e-7)


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_in_8_bits_are_exact_in_whole_numbers(backend: Backend, bits: int) -> None:
    backend = backend_for(backend, 8)
    weight = replace(draw(64, 3, 128, bits), scale_OG=torch.ones(64, 3))
    x_TI = torch.randint(-127, 128, (5, 384)).float()
    x_TI[:, ::128] = 127
    assert torch.equal(backend.linear(x_TI, pack(backend, weight)), x_TI @ dequantised(weight).t())


@pytest.mark.parametrize("input_bits", [8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_is_the_same_bits_whoever_stands_beside_it(
    backend: Backend, bits: int, dtype: torch.dtype, input_bits: int
) -> None:
    backend = backend_for(backend, input_bits)
    weight = pack(backend, draw(592, 4, 128, bits, dtype=dtype))
    x_TI = torch.randn(23, 512).to(dtype)
    x_TI[3] *= 1000
    together = backend.linear(x_TI, weight)
    for row in range(len(x_TI)):
        assert torch.equal(backend.linear(x_TI[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("input_bits", [8, 16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_fails_its_own_token_alone(
    backend: Backend, value: float, input_bits: int
) -> None:
    backend = backend_for(backend, input_bits)
    x_TI = torch.randn(5, 64)
    x_TI[2, 17] = value
    result = backend.linear(x_TI, pack(backend, draw(32, 2, 32, 4)))
    assert result[2].isnan().all()
    assert result[[0, 1, 3, 4]].isfinite().all()


def test_a_token_of_zeros_gives_the_bias(backend: Backend) -> None:
    x_TI, bias_O = torch.randn(2, 64), torch.randn(32)
    x_TI[0] = 0.0
    assert torch.equal(backend.linear(x_TI, pack(backend, draw(32, 2, 32, 8)), bias_O)[0], bias_O)


def test_a_weight_takes_little_more_memory_than_its_numbers(backend: Backend) -> None:
    """Scales and zeros are 5 bytes for 128 numbers."""
    for bits in (4, 8):
        weight = pack(backend, draw(64, 32, 128, bits))
        assert isinstance(weight, GroupedWeight)
        assert weight.memory.nbytes == 64 * 4096 * bits // 8 + 64 * 32 * 5


def test_other_shapes_and_types_become_plain_numbers(backend: Backend) -> None:
    fp8 = Fp8Weight(
        weight_OI=torch.randn(32, 64).to(torch.float8_e4m3fn),
        scale=torch.ones(32),
        block_shape=None,
        dtype=torch.float32,
    )
    plain: list[QuantisedWeight] = [
        draw(31, 2, 32, 4),
        draw(32, 2, 30, 8),
        draw(32, 2, 32, 4, dtype=torch.half),
        fp8,
    ]
    for weight in plain:
        packed_weight = backend.pack_linear(weight)
        assert isinstance(packed_weight, torch.Tensor)
        x_TI = torch.randn(3, weight.shape[1]).to(weight.dtype)
        expected = x_TI @ dequantised(weight).t()
        torch.testing.assert_close(backend.linear(x_TI, packed_weight), expected, atol=1e-2, rtol=1e-2)


def test_inputs_that_do_not_fit_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="a weight of 64 inputs for 60"):
        backend.linear(torch.randn(2, 60), pack(backend, draw(32, 2, 32, 4)))
