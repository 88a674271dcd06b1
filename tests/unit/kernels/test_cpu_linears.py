"""Linears in C++: on panels of 64 outputs, in int8, and with weights of 4 and 8 bits in groups.

Whole numbers are multiplied exactly, a token has the same bits in any batch, and shapes that do not fit are refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.grouped_linear import GroupedWeight
from blockyard.kernels.cpu.int8_linear import can_quantise
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.kernels.cpu.native_linear import LANES
from blockyard.kernels.cpu.panel_linear import can_lay_out, lay_out
from blockyard.kernels.quantised import QuantisedWeight, dequantised
from blockyard.kernels.selection import choose_backend
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .rig import CPU, NAN, normal, with_threads
from .weights import fp8_weight, int4_weight, int8_weight

DTYPES = [torch.float32, torch.bfloat16]
GROUPED = ("int4, 16 bits", "int4, 8 bits", "int8 in groups, 16 bits", "int8 in groups, 8 bits")
"""Bits of a weight, and those that its inputs are rounded to."""
KINDS = ("panels", "int8", *GROUPED)
PROPERTY = examples(60, deadline=None)


@pytest.fixture(scope="session")
def library(cpu_backend: CpuBackend) -> CpuLibrary:
    if not cpu_backend.library.has_linear(is_bf16=False):
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    return cpu_backend.library


def backend_of(library: CpuLibrary, kind: str) -> CpuBackend:
    return CpuBackend(library, linears="int8" if kind == "int8" or kind.endswith(", 8 bits") else "full")


def grouped(
    kind: str, outputs: int, inputs: int, group_size: int, dtype: torch.dtype, **options: Any
) -> QuantisedWeight:
    make = int4_weight if kind.startswith("int4") else int8_weight
    return make(outputs, inputs, group_size, dtype, **{"has_zeros": True, **options})


def pack(backend: CpuBackend, kind: str, outputs: int, inputs: int, dtype: torch.dtype) -> Any:
    plain_OI = normal(outputs, inputs, dtype=dtype)
    if kind == "panels":
        return lay_out(plain_OI)
    return backend.pack_linear(grouped(kind, outputs, inputs, 32, dtype) if kind in GROUPED else plain_OI)


def whole(rows: int, columns: int, limit: int) -> torch.Tensor:
    """Return whole numbers up to the limit, which is in each row: then its scale is 1, and nothing is rounded."""
    numbers = torch.randint(-limit, limit + 1, (rows, columns)).float()
    numbers[:, columns // 2] = limit
    return numbers


@PROPERTY
@given(
    kind=st.sampled_from(["panels", "int8"]),
    rows=st.integers(0, 40) | st.integers(500, 530),
    inputs=st.integers(1, 70).map(lambda quarter: 4 * quarter),
    outputs=st.integers(1, 20).map(lambda group: LANES * group),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_products_of_any_shape_are_exact_in_whole_numbers(
    library: CpuLibrary, kind: str, rows: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """Panels also in bf16 where this CPU's oneDNN would be asked for it, and for inputs of any even number."""
    backend, limit = backend_of(library, kind), 8 if kind == "panels" else 127
    inputs += 2 * (kind == "panels")
    x_TI, weight_OI = whole(rows, inputs, limit), whole(outputs, inputs, limit)
    bias_O = torch.randint(-1000, 1000, (outputs,)).to(dtype) if has_bias else None
    weight = lay_out(weight_OI.to(dtype)) if kind == "panels" else backend.pack_linear(weight_OI.to(dtype))
    assert kind == "panels" or weight.dtype == torch.int8
    actual = backend.linear(x_TI.to(dtype), weight, bias_O)
    expected = x_TI @ weight_OI.t() + (0 if bias_O is None else bias_O.float())
    assert torch.equal(actual, expected.to(dtype))


@PROPERTY
@given(
    kind=st.sampled_from(GROUPED),
    rows=st.integers(0, 11),
    groups=st.integers(1, 4),
    size=st.integers(1, 40).map(lambda eighth: 8 * eighth),
    outputs=st.integers(1, 6).map(lambda group: 16 * group),
    has_order=st.booleans(),
    has_zeros=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_products_of_any_groups_are_those_of_the_dequantised_weight(
    library: CpuLibrary,
    kind: str,
    rows: int,
    groups: int,
    size: int,
    outputs: int,
    has_order: bool,
    has_zeros: bool,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    backend = backend_of(library, kind)
    weight = grouped(kind, outputs, groups * size, size, dtype, has_order=has_order, has_zeros=has_zeros)
    packed = backend.pack_linear(weight)
    assert isinstance(packed, GroupedWeight)
    x_TI = torch.randn(rows, groups * size).to(dtype)
    bias_O = torch.randn(outputs).to(dtype) if has_bias else None
    actual = backend.linear(x_TI, packed, bias_O)
    assert actual.dtype == dtype
    exact_OI = dequantised(replace(weight, dtype=torch.float32)).double()
    expected = x_TI.double() @ exact_OI.t() + (0 if bias_O is None else bias_O.double())
    # Inputs are off by half a step of the largest in their chunk.
    step = x_TI.double().abs().amax(1, keepdim=True) / (127 if kind.endswith(", 8 bits") else 127 * 256)
    rounding = torch.finfo(dtype).eps * expected.abs() + 1e-5
    error = (actual.double() - expected).abs()
    assert bool((error <= 0.5 * step * exact_OI.abs().sum(1) + rounding).all())


@pytest.mark.parametrize("kind", GROUPED)
def test_whole_numbers_of_groups_are_exact(library: CpuLibrary, kind: str) -> None:
    """With 16 bits an input from -32512 to 32512 is not rounded, and sums of a chunk are integers."""
    backend, in_8_bits = backend_of(library, kind), kind.endswith(", 8 bits")
    weight = replace(grouped(kind, 64, 384, 128, torch.float32), scale_OG=torch.ones(64, 3))
    packed, bits = backend.pack_linear(weight), 4 if kind.startswith("int4") else 8
    beside = packed.memory.nbytes - 64 * 3 * (128 * bits // 8 + 5)
    assert 0 <= beside < 4 * 64, "scales and zeros are 5 bytes for a group, and each 16 outputs end on a line"
    limit = 127 if in_8_bits else 32512
    x_TI = torch.randint(-limit, limit + 1, (5, 384)).float()
    x_TI[:, ::128] = limit
    expected = (x_TI.double() @ dequantised(weight).double().t()).float()
    tolerance = {"atol": 0.0, "rtol": 0.0} if in_8_bits else {"atol": 16.0, "rtol": 3e-7}
    torch.testing.assert_close(backend.linear(x_TI, packed), expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_bits_whoever_stands_beside_it(
    library: CpuLibrary, kind: str, dtype: torch.dtype
) -> None:
    """Panels are large enough for several threads, which share many rows of so few outputs by rows too."""
    backend = backend_of(library, kind)
    rows, outputs, inputs = (200, 192, 1400) if kind == "panels" else (23, 592, 512)
    x_TI, weight = torch.randn(rows, inputs).to(dtype), pack(backend, kind, outputs, inputs, dtype)
    x_TI[3] *= 1000
    together = backend.linear(x_TI, weight)
    for count in (1, 2, 5, 7, 13, 20, 31, 97, 150):
        for first in range(0, rows - count + 1, max(1, (rows - count) // (20 if count == 1 else 1))):
            alone = backend.linear(x_TI[first : first + count], weight)
            assert torch.equal(alone, together[first : first + count]), (first, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_a_large_weight(library: CpuLibrary, dtype: torch.dtype) -> None:
    backend, weight_OI = CpuBackend(library), torch.randint(-8, 9, (960, 1000)).to(dtype)
    weight = lay_out(weight_OI)
    for rows in (0, 1, 7, 40, 530):
        x_TI = torch.randint(-8, 9, (rows, 1000)).to(dtype)
        expected = (x_TI.float() @ weight_OI.float().t()).to(dtype)
        for threads in (2, 1, 3, 16):
            actual = with_threads(threads, lambda x_TI=x_TI: backend.linear(x_TI, weight))
            assert torch.equal(actual, expected), (rows, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(library: CpuLibrary, dtype: torch.dtype) -> None:
    wide, weight_OI = torch.randint(-8, 9, (9, 301)).to(dtype), torch.randint(-8, 9, (128, 260)).to(dtype)
    expected = wide[:, 17:277].float() @ weight_OI.float().t()
    assert torch.equal(CpuBackend(library).linear(wide[:, 17:277], lay_out(weight_OI)), expected.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_fails_its_own_token_alone(library: CpuLibrary, kind: str) -> None:
    backend = backend_of(library, kind)
    for dtype in DTYPES:
        weight = pack(backend, kind, 64, 64, dtype)
        for value in (NAN, float("inf"), float("-inf")):
            x_TI = torch.randn(7, 64, dtype=dtype)
            x_TI[2, 17] = value
            result = backend.linear(x_TI, weight)
            assert not result[2].isfinite().any()
            assert kind == "panels" or result[2].isnan().all()
            assert result[[0, 1, 3, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_or_an_output_of_zeros_gives_the_bias(library: CpuLibrary, kind: str) -> None:
    backend, weight_OI = backend_of(library, kind), torch.randn(32, 64)
    weight_OI[5] = 0.0
    x_TI, bias_O = torch.randn(2, 64), torch.randn(32)
    x_TI[0] = 0.0
    weight = backend.pack_linear(weight_OI) if kind == "int8" else pack(backend, kind, 32, 64, torch.float32)
    result = backend.linear(x_TI, weight, bias_O)
    assert torch.equal(result[0], bias_O)
    assert kind != "int8" or result[1, 5] == bias_O[5]


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_whose_inverse_is_infinite_keep_their_sign(library: CpuLibrary, sign: int) -> None:
    backend, x_TI = backend_of(library, "int8"), torch.full((3, 64), sign * 1e-38)
    result = backend.linear(x_TI, backend.pack_linear(torch.ones(32, 64)))
    torch.testing.assert_close(result, torch.full((3, 32), sign * 64e-38), atol=0, rtol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_int8_is_about_one_percent(library: CpuLibrary, dtype: torch.dtype) -> None:
    backend = backend_of(library, "int8")
    x_TI, weight_OI = torch.randn(33, 1024).to(dtype), torch.randn(256, 1024).to(dtype) * 0.02
    exact = x_TI.float() @ weight_OI.float().t()
    error = backend.linear(x_TI, backend.pack_linear(weight_OI)).float() - exact
    assert float(error.norm() / exact.norm()) < 0.015


def test_weights_that_do_not_fit_keep_plain_linears(library: CpuLibrary) -> None:
    panels, int8 = backend_of(library, "panels"), backend_of(library, "int8")
    assert panels.pack_linear(torch.zeros(512, 512)).shape == (32, 512, 16)
    for shape in ((500, 512), (512, 501)):
        assert not can_lay_out(library, torch.zeros(shape))
        assert panels.pack_linear(torch.zeros(shape)).dim() == 2
    assert not can_lay_out(library, torch.zeros(512, 512, dtype=torch.float16))
    assert not can_lay_out(library, torch.zeros(512, 512, device="meta"))
    multiplies_tiles = "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    packed = panels.pack_linear(torch.zeros(512, 512, dtype=torch.bfloat16))
    assert packed.shape == ((512, 512) if multiplies_tiles else (32, 256, 16, 2))
    assert can_quantise(torch.zeros(32, 64))
    for weight_OI in (torch.zeros(31, 64), torch.zeros(32, 64).half()):
        assert int8.pack_linear(weight_OI) is weight_OI
    assert int8.pack_linear(torch.zeros(32, 62)).dtype == torch.float32
    for weight in (
        int4_weight(31, 64, 32, torch.float32),
        int8_weight(32, 60, 30, torch.float32),
        int4_weight(32, 64, 32, torch.half),
        fp8_weight(32, 64, None, torch.float32),
    ):
        packed = panels.pack_linear(weight)
        assert isinstance(packed, torch.Tensor)
        x_TI = torch.randn(3, weight.shape[1]).to(weight.dtype)
        expected = x_TI @ dequantised(weight).t()
        torch.testing.assert_close(panels.linear(x_TI, packed), expected, atol=1e-2, rtol=1e-2)


def test_what_does_not_fit_is_refused(library: CpuLibrary) -> None:
    weight, half = lay_out(torch.zeros(128, 256)), lay_out(torch.zeros(128, 256, dtype=torch.bfloat16))
    x_TI, backend = torch.zeros(3, 256), CpuBackend(library)
    for laid_out, inputs, bias_O, told in (
        (weight, torch.zeros(3, 254), None, "for 254 inputs"),
        (weight, x_TI.bfloat16(), None, "inputs in torch.bfloat16"),
        (half, torch.zeros(3, 255, dtype=torch.bfloat16), None, "for 255 inputs"),
        (half, torch.zeros(3, 257, dtype=torch.bfloat16), None, "for 257 inputs"),
        (lay_out(torch.zeros(80, 256)).clone(), x_TI, None, "a weight"),
        (lay_out(torch.zeros(64, 256))[1:], x_TI, None, "a weight"),
        (lay_out(torch.zeros(128, 512))[:, :256], x_TI, None, "in pieces"),
        (weight.half(), x_TI.half(), None, "a weight"),
        (weight, torch.zeros(256, 3).t(), None, "not in rows"),
        (weight, torch.zeros(3, 256, device="meta"), None, "another memory"),
        (weight, x_TI, torch.zeros(127), "a bias that is not 128"),
        (weight, x_TI, torch.zeros(128, dtype=torch.bfloat16), "a bias that is not 128"),
        (
            pack(backend, GROUPED[0], 32, 64, torch.float32),
            torch.randn(2, 60),
            None,
            "64 inputs for 60",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            backend.linear(inputs, laid_out, bias_O)


def test_who_cannot_have_int8_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for device, options, told in (
        (CPU, {"deterministic": True}, "not for deterministic mode"),
        (CPU, {"requested": "torch"}, "not for backend 'torch' on cpu"),
        (torch.device("cuda"), {}, "not for backend 'auto' on cuda"),
        (CPU, {}, "the cpu backend is unavailable"),
    ):
        with pytest.raises(ValueError, match=told):
            choose_backend(device, linears="int8", **options)
