"""Conversions of a quantised pool's numbers in Triton equal PyTorch's bit for bit, also by the device's own e4m3
instructions.

Integer arithmetic is tried everywhere, the instructions only on a GPU that has them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from blockyard.kernels.kv_pool import LARGEST
from blockyard.kernels.triton.numbers.devices import converts_e4m3
from blockyard.kernels.triton.numbers.quantised_heads import rounded, widened

from .rig import DEVICE, FLOATS

WAYS = ["int8", "e4m3 by integer arithmetic", "e4m3 by instructions"]
LINE = 256


@triton.jit
def read_kernel(numbers_ptr, out_ptr, EARLY: tl.constexpr, LINE: tl.constexpr):
    at = tl.program_id(0) * LINE + tl.arange(0, LINE)[None, :]
    tl.store(out_ptr + at, widened(tl.load(numbers_ptr + at), out_ptr.dtype.element_ty, EARLY))


@triton.jit
def write_kernel(wide_ptr, numbers_ptr, LINE: tl.constexpr):
    at = tl.program_id(0) * LINE + tl.arange(0, LINE)[None, :]
    tl.store(numbers_ptr + at, rounded(tl.load(wide_ptr + at), numbers_ptr.dtype.element_ty))


def number_types(way: str) -> tuple[torch.dtype, torch.dtype]:
    """Return the type of the numbers, and the one under which a kernel gets their memory."""
    if way == "e4m3 by instructions" and not converts_e4m3(DEVICE):
        pytest.skip("no GPU here converts e4m3: NVIDIA's do from compute capability 8.9 on")
    if way == "int8":
        return torch.int8, torch.int8
    return torch.float8_e4m3fn, torch.uint8 if way == "e4m3 by integer arithmetic" else torch.float8_e4m3fn


def edges_of_rounding(dtype: torch.dtype) -> torch.Tensor:
    """Every number of the type, every midpoint between two of them, and the fp32 on both sides of each; a multiple of
    LINE."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.abs() <= LARGEST[dtype]].unique()
    points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    infinity = torch.tensor(float("inf"))
    beside = torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38])
    scattered = (torch.rand(4096) * 2 - 1) * LARGEST[dtype] * 2.0 ** -torch.randint(0, 20, (4096,))
    edges = torch.cat([beside, tiny, scattered])
    return torch.cat([edges, torch.zeros(-len(edges) % LINE)])


@pytest.mark.parametrize("way", WAYS)
def test_each_of_256_codes_is_read_as_pytorch_reads_it(way: str) -> None:
    stored, passed = number_types(way)
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype, is_early in product(FLOATS, (False, True)):
        if way == "int8" and dtype == torch.bfloat16 and DEVICE.type == "cpu":
            continue  # The interpreter does not run PTX, and attention reads fp32 there.
        wide = torch.full((256,), 7.0, dtype=dtype, device=DEVICE)
        read_kernel[(1,)](codes.to(DEVICE).view(passed), wide, is_early, LINE, num_warps=1)
        expected, actual = codes.view(stored).to(dtype), wide.cpu()
        is_nan = expected.isnan()
        assert torch.equal(actual.isnan(), is_nan), (dtype, is_early)
        assert torch.equal(bits_of(actual)[~is_nan], bits_of(expected)[~is_nan]), (dtype, is_early)


@pytest.mark.parametrize("way", WAYS)
def test_each_fp32_is_stored_as_pytorch_rounds_it(way: str) -> None:
    """The edges go one fp32 beyond the largest number, as a head's peak does when its scale was rounded down."""
    stored, passed = number_types(way)
    wide = edges_of_rounding(stored)
    codes = torch.empty(len(wide), dtype=torch.uint8, device=DEVICE)
    write_kernel[(len(wide) // LINE,)](wide.to(DEVICE), codes.view(passed), LINE, num_warps=1)
    expected = wide.round().to(stored) if stored == torch.int8 else wide.to(stored)
    assert torch.equal(codes.cpu(), expected.view(torch.uint8))


def bits_of(wide: torch.Tensor) -> torch.Tensor:
    return wide.view(torch.int32 if wide.dtype == torch.float32 else torch.int16)
