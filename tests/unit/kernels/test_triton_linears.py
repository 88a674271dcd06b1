"""Triton's linears with weights of 4 or 8 bits, against the weight as plain numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blockyard.kernels.interface import Backend
from blockyard.kernels.kv_pool import quantise
from blockyard.kernels.quantised import QuantisedWeight, dequantised
from blockyard.kernels.triton.linears import launches
from blockyard.kernels.triton.linears.choice import DEQUANTISE_FROM_TOKENS
from blockyard.kernels.triton.linears.inputs import launch_quantise_inputs
from blockyard.kernels.triton.linears.launches import launch_quantised_linear
from blockyard.kernels.triton.linears.weights import TiledWeight, tiled

from .rig import DEVICE, NAN, crossed, normal
from .weights import assert_product, fp8_weight, inputs_for, int4_weight, int8_weight, moved

# Outputs and inputs are no multiples of a tile where the scheme allows it.
WEIGHTS: dict[str, Callable[[torch.dtype], QuantisedWeight]] = {
    "int4, groups of 32": lambda dtype: int4_weight(65, 96, 32, dtype),
    "int4, groups of 64": lambda dtype: int4_weight(48, 192, 64, dtype),
    "int4, groups of 128": lambda dtype: int4_weight(130, 1152, 128, dtype),
    "int4, groups of 256": lambda dtype: int4_weight(16, 512, 256, dtype),
    "int4, one group": lambda dtype: int4_weight(33, 200, 200, dtype),
    "int4, symmetric": lambda dtype: int4_weight(40, 256, 128, dtype, has_zeros=False),
    "int4, act order": lambda dtype: int4_weight(40, 256, 64, dtype, has_order=True),
    "int8, one group": lambda dtype: int8_weight(66, 200, 200, dtype),
    "int8, groups": lambda dtype: int8_weight(31, 384, 128, dtype),
    "int8, zero points": lambda dtype: int8_weight(17, 256, 64, dtype, has_zeros=True),
    "fp8, outputs": lambda dtype: fp8_weight(65, 140, None, dtype),
    "fp8, blocks": lambda dtype: fp8_weight(200, 330, (128, 128), dtype),
    "fp8, blocks of 64": lambda dtype: fp8_weight(70, 96, (32, 64), dtype),
}
IN_8_BITS: dict[str, Any] = {
    "int8, one group": torch.int8,
    "fp8, outputs": torch.float8_e4m3fn,
    "fp8, blocks": torch.float8_e4m3fn,
    "fp8, blocks of 64": torch.float8_e4m3fn,
}
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def of(name: str, dtype: torch.dtype) -> QuantisedWeight:
    return moved(WEIGHTS[name](dtype))


def quickly(count: int, **values: Any) -> Callable[[Any], Any]:
    """Cross the values as `case`. Triton's interpreter tries the first ones alone unless by night."""
    cases = crossed(**values)
    mark = pytest.mark.quick_cases(count if DEVICE.type == "cpu" else len(cases))
    return lambda test: mark(pytest.mark.parametrize("case", cases.values(), ids=cases)(test))


@quickly(len(WEIGHTS), name=list(WEIGHTS), dtype=DTYPES)
def test_the_product_is_that_of_the_weight_as_plain_numbers(
    triton_backend: Backend, case: dict[str, Any]
) -> None:
    weight = of(**case)
    packed = triton_backend.pack_linear(weight)
    assert isinstance(packed, TiledWeight)
    bias_O, plain_OI = normal(weight.shape[0], dtype=case["dtype"]), dequantised(weight).float()
    for rows, bias in ((1, None), (19, bias_O)):
        x_TI = inputs_for(weight, rows)
        result = triton_backend.linear(x_TI, packed, bias)
        assert result.dtype == case["dtype"]
        assert_product(result, F.linear(x_TI.float(), plain_OI, None if bias is None else bias.float()))


@quickly(len(WEIGHTS), name=list(WEIGHTS), dtype=DTYPES)
def test_many_tokens_are_multiplied_by_the_weight_written_out(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out in parts, of which the last is smaller, it is the weight as plain numbers but for its rounding."""
    weight = of(**case)
    outputs, inputs = weight.shape
    monkeypatch.setattr(launches, "DEQUANTISED_BYTES", 40 * inputs * case["dtype"].itemsize)
    monkeypatch.setattr(launches, "quantised_linear_kernel", None)
    x_TI, plain_OI = inputs_for(weight, DEQUANTISE_FROM_TOKENS), dequantised(weight).float()
    for bias in (None, normal(outputs, dtype=case["dtype"])):
        result = launch_quantised_linear(x_TI, tiled(weight), bias)
        assert result.dtype == case["dtype"]
        assert_product(result, F.linear(x_TI.float(), plain_OI, None if bias is None else bias.float()))


@pytest.mark.parametrize(
    ("make", "rows"),
    [(lambda: int4_weight(130, 256, 64, torch.bfloat16), rows) for rows in (64, 65, 130)]
    + [(lambda: int8_weight(70, 32, 32, torch.float32), 150)],
    ids=["64", "65", "130", "many tiles of tokens"],
)
def test_each_size_of_tiles_computes_the_same(make: Callable[[], QuantisedWeight], rows: int) -> None:
    weight = moved(make())
    x_TI = inputs_for(weight, rows)
    result = launch_quantised_linear(x_TI, tiled(weight), None)
    assert_product(result, x_TI.float() @ dequantised(weight).float().T)


def test_a_weight_in_groups_that_are_too_small_becomes_plain_numbers(triton_backend: Backend) -> None:
    weight = moved(int4_weight(8, 64, 16, torch.float32))
    x_TI, packed = inputs_for(weight, 5), triton_backend.pack_linear(weight)
    assert isinstance(packed, torch.Tensor)
    assert_product(triton_backend.linear(x_TI, packed), x_TI @ dequantised(weight).T)


def test_inputs_of_another_width_are_refused_and_no_tokens_give_no_rows() -> None:
    layout = tiled(moved(int4_weight(8, 64, 32, torch.float32)))
    with pytest.raises(ValueError, match="64 inputs got 63"):
        launch_quantised_linear(torch.zeros(1, 63, device=DEVICE), layout, None)
    assert launch_quantised_linear(torch.zeros(0, 64, device=DEVICE), layout, None).shape == (0, 8)


def units_of(x_TI: torch.Tensor, unit: int) -> torch.Tensor:
    """Return the units of all tokens [T, U, C]. The last is padded with zeros."""
    return F.pad(x_TI, (0, -x_TI.shape[1] % unit)).view(len(x_TI), -1, unit)


@quickly(len(IN_8_BITS), name=list(IN_8_BITS), dtype=DTYPES)
def test_inputs_of_8_bits_are_multiplied_as_they_are(case: dict[str, Any]) -> None:
    name, weight = case["name"], of(case["name"], torch.float32)
    layout = tiled(weight, quantises_inputs=True)
    assert layout.quantises_inputs
    unit = layout.unit if layout.units_a_group else weight.shape[1]
    for rows in (1, 19):
        x_TI = inputs_for(weight, rows).to(case["dtype"])
        numbers_TUC, scale_TU = quantise(units_of(x_TI, unit), IN_8_BITS[name])
        rounded_TI = (numbers_TUC.float() * scale_TU[..., None]).flatten(1)[:, : x_TI.shape[1]]
        assert_product(launch_quantised_linear(x_TI, layout, None), rounded_TI @ dequantised(weight).T)


def test_other_weights_take_inputs_in_full_precision() -> None:
    for name in WEIGHTS.keys() - IN_8_BITS.keys():
        assert not tiled(of(name, torch.float32), quantises_inputs=True).quantises_inputs


@quickly(4, shape=[(300, 300), (300, 128), (64, 32), (5000, 128)], number=[torch.int8, torch.float8_e4m3fn])
def test_inputs_are_rounded_as_heads_of_a_pool_are(case: dict[str, Any]) -> None:
    (inputs, unit), number = case["shape"], case["number"]
    x_TI = normal(3, inputs)
    x_TI[1, :unit] = 0.0
    x_TI[2, inputs - 1] = float("inf")
    numbers_TI, scale_UT = launch_quantise_inputs(x_TI, number, unit)
    expected_TUC, expected_TU = quantise(units_of(x_TI, unit), number)
    assert torch.equal(scale_UT.T.nan_to_num(-1.0), expected_TU.nan_to_num(-1.0))
    expected_TI = expected_TUC.float().flatten(1)[:, :inputs]
    assert torch.equal(numbers_TI.view(number).float()[:2], expected_TI[:2])
    assert bool(scale_UT[-1, 2].isnan())


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    for name, quantises_inputs in (("int4, groups of 64", False), ("int8, one group", True)):
        weight = of(name, torch.float32)
        x_TI = inputs_for(weight, 4).contiguous()
        x_TI[1, 3] = NAN
        result = launch_quantised_linear(x_TI, tiled(weight, quantises_inputs=quantises_inputs), None)
        assert result.isnan().all(dim=1).tolist() == [False, True, False, False]
        assert not result[[0, 2, 3]].isnan().any()
