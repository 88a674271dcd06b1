"""Advice about pages changes where memory lies, never what is in it."""

from pathlib import Path

import pytest
import torch
from blockyard.kernels.huge_pages import advise_empty, collapse_packed
from blockyard.kernels.packed_linear import can_pack, pack, packed_linear

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def is_advised(address: int) -> bool:
    """Whether the mapping that holds this address is one that the system was asked to give in huge pages.

    Whether it has any to give is for its memory's fragments to decide.
    """
    is_here = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, *rest = line.split()
        if "-" in first:
            begin, end = (int(bound, 16) for bound in first.split("-"))
            is_here = begin <= address < end
        elif is_here and first == "VmFlags:":
            return "hg" in rest
    raise LookupError(hex(address))


@pytest.fixture
def are_given() -> None:
    if not SETTING.exists():
        pytest.skip("this system has no huge pages")


def test_memory_to_come_is_asked_for_in_huge_pages(are_given: None) -> None:
    tensor = torch.empty(8, 1 << 20)
    middle = tensor.data_ptr() + tensor.nbytes // 2
    assert not is_advised(middle)
    advise_empty(tensor)
    assert is_advised(middle)
    assert not tensor.zero_().any()


@pytest.mark.skipif(not can_pack(), reason="this PyTorch packs no weights")
def test_a_packed_weight_computes_as_before(are_given: None) -> None:
    weight_OI, x_TI = torch.randn(4096, 2048), torch.randn(3, 2048)
    packed = pack(weight_OI)
    expected = packed_linear(x_TI, packed, None)
    collapse_packed(packed)
    assert is_advised(torch.ops.mkldnn.data_ptr(packed) + weight_OI.nbytes // 2)
    assert torch.equal(packed_linear(x_TI, packed, None), expected)


@pytest.mark.parametrize("shape", [(0,), (3,), (1 << 19,), (1 << 20, 3)])
def test_memory_of_any_size_may_be_advised(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected = tensor.clone()
    advise_empty(tensor[1:])
    collapse_packed(tensor)
    assert torch.equal(tensor, expected)
