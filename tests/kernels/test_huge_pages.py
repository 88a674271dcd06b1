"""Advice about pages changes where memory lies, never what is in it."""

from pathlib import Path

import pytest
import torch
from blockyard.kernels.huge_pages import advise_empty, collapse_packed
from blockyard.kernels.packed_linear import can_pack, pack, packed_linear

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.fixture
def are_given() -> None:
    if not SETTING.exists() or "[never]" in SETTING.read_text(encoding="ascii"):
        pytest.skip("this system gives no huge pages")


def test_what_is_advised_comes_in_huge_pages(are_given: None) -> None:
    before = huge_kib()
    tensor = torch.empty(8, 1 << 20)
    advise_empty(tensor)
    tensor.zero_()
    assert huge_kib() - before >= 16 << 10
    assert not tensor.any()


@pytest.mark.skipif(not can_pack(), reason="this PyTorch packs no weights")
def test_a_packed_weight_computes_as_before(are_given: None) -> None:
    weight_OI, x_TI = torch.randn(4096, 2048), torch.randn(3, 2048)
    packed = pack(weight_OI)
    expected = packed_linear(x_TI, packed, None)
    before = huge_kib()
    collapse_packed(packed)
    assert huge_kib() - before >= 8 << 10
    assert torch.equal(packed_linear(x_TI, packed, None), expected)


@pytest.mark.parametrize("shape", [(0,), (3,), (1 << 19,), (1 << 20, 3)])
def test_memory_of_any_size_may_be_advised(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected = tensor.clone()
    advise_empty(tensor[1:])
    collapse_packed(tensor)
    assert torch.equal(tensor, expected)
