"""Advice about pages changes where memory lies, never what is in it."""

import mmap
from pathlib import Path

import pytest
import torch
from blockyard.kernels.huge_pages import HUGE_PAGE_BYTES, advise_empty, collapse_packed
from blockyard.kernels.packed_linear import can_pack, pack, packed_linear

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def field_of_mapping(address: int, name: str) -> list[str]:
    """What /proc says of the mapping that holds this address."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, *rest = line.split()
        if "-" in first:
            begin, end = (int(bound, 16) for bound in first.split("-"))
            is_here = begin <= address < end
        elif is_here and first == name:
            return rest
    raise LookupError(hex(address))


def is_advised(address: int) -> bool:
    """Whether the mapping that holds this address is one that the system was asked to give in huge pages.

    Whether it has any to give is for its memory's fragments to decide.
    """
    return "hg" in field_of_mapping(address, "VmFlags:")


def huge_kib_at(address: int) -> int:
    """Of the mapping that holds this address: allocators give again what they were given, huge pages too."""
    return int(field_of_mapping(address, "AnonHugePages:")[0])


def huge_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def are_at_hand(num_bytes: int) -> bool:
    """Whether the system gives them right now, to whoever asks: here the test itself."""
    before = huge_kib()
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[::4096] = bytes(num_bytes // 4096)
        return huge_kib() - before >= num_bytes * 3 // 4 >> 10


@pytest.fixture
def are_given() -> None:
    if not SETTING.exists():
        pytest.skip("this system has no huge pages")


def test_memory_to_come_is_asked_for_in_huge_pages(are_given: None) -> None:
    tensor = torch.empty(16, 1 << 20)  # glibc has nothing so large in its heap
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-begin // HUGE_PAGE_BYTES), end // HUGE_PAGE_BYTES
    whole = [page * HUGE_PAGE_BYTES for page in range(first, last)]
    assert not any(map(is_advised, whole))
    advise_empty(tensor)
    assert all(map(is_advised, whole))
    some_were_at_hand = are_at_hand(tensor.nbytes)
    assert not tensor.zero_().any()
    if some_were_at_hand and are_at_hand(tensor.nbytes):
        assert huge_kib_at(whole[0]) > 0  # how many lies with others who take them at the same time


@pytest.mark.skipif(not can_pack(torch.float32), reason="this PyTorch packs no weights")
def test_a_packed_weight_computes_as_before(are_given: None) -> None:
    weight_OI, x_TI = torch.randn(4096, 2048), torch.randn(3, 2048)
    packed = pack(weight_OI)
    expected = packed_linear(x_TI, packed, None)
    before, some_are_at_hand = huge_kib(), are_at_hand(weight_OI.nbytes)
    collapse_packed(packed)
    if some_are_at_hand:
        assert huge_kib() - before >= 8 << 10
    assert is_advised(torch.ops.mkldnn.data_ptr(packed) + weight_OI.nbytes // 2)
    assert torch.equal(packed_linear(x_TI, packed, None), expected)


@pytest.mark.parametrize("shape", [(0,), (3,), (1 << 19,), (1 << 20, 3)])
def test_memory_of_any_size_may_be_advised(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected = tensor.clone()
    advise_empty(tensor[1:])
    collapse_packed(tensor)
    assert torch.equal(tensor, expected)
