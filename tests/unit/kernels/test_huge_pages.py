"""Advice about pages changes where memory is, never its content."""

import mmap
from pathlib import Path

import pytest
import torch
from blockyard.kernels.torch.huge_pages import HUGE_PAGE_BYTES, advise_empty, collapse_packed
from blockyard.kernels.torch.packed_linear import can_pack, pack, packed_linear

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ATTEMPTS = 4


def fields_of_mappings(begin: int, end: int, name: str) -> list[list[str]]:
    """Return the fields of this name in /proc/self/smaps of the mappings that hold these addresses, in their order."""
    fields, is_here = [], False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, *rest = line.split()
        if "-" in first:
            first_address, last_address = (int(bound, 16) for bound in first.split("-"))
            is_here = first_address < end and begin < last_address
        elif is_here and first == name:
            fields.append(rest)
    return fields


def are_advised(begin: int, end: int) -> list[bool]:
    """Return for each mapping that holds these addresses whether huge pages were requested.

    The system grants them only if its memory is not too fragmented.
    """
    return ["hg" in flags for flags in fields_of_mappings(begin, end, "VmFlags:")]


def huge_kib_at(begin: int, end: int) -> int:
    """Return the KiB of huge pages in the mappings of these addresses. Allocators reuse memory, huge pages included."""
    return sum(int(kib) for kib, _ in fields_of_mappings(begin, end, "AnonHugePages:"))


def huge_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def are_at_hand(num_bytes: int) -> bool:
    """Return whether the system grants huge pages now: the test requests some itself."""
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
    """More than half of it comes so wherever there are enough before and after, in one of a few attempts: between the
    two probes other processes may take them.

    An allocation beside memory that an earlier test has advised may begin advised, and is passed over.
    """
    kept, given, num_asked = [], [], 0
    while len(kept) < ATTEMPTS and not any(kib >= 32 << 10 for kib in given):
        tensor = torch.empty(16, 1 << 20)  # glibc has nothing so large in its heap
        kept.append(tensor)
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        begin, end = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if any(are_advised(begin, end)):
            continue
        num_asked += 1
        advise_empty(tensor)
        assert set(are_advised(begin, end)) == {True}
        some_were_at_hand = are_at_hand(tensor.nbytes)
        assert not tensor.zero_().any()
        if some_were_at_hand and are_at_hand(tensor.nbytes):
            given.append(huge_kib_at(begin, end))
    assert num_asked, "all memory was advised before"
    assert not given or max(given) >= 32 << 10


@pytest.mark.skipif(not can_pack(torch.float32), reason="this PyTorch packs no weights")
def test_a_packed_weight_computes_as_before(are_given: None) -> None:
    weight_OI, x_TI = torch.randn(4096, 2048), torch.randn(3, 2048)
    packed = pack(weight_OI)
    expected = packed_linear(x_TI, packed, None)
    before, some_are_at_hand = huge_kib(), are_at_hand(weight_OI.nbytes)
    collapse_packed(packed)
    if some_are_at_hand:
        assert huge_kib() - before >= 8 << 10
    middle = torch.ops.mkldnn.data_ptr(packed) + weight_OI.nbytes // 2
    assert are_advised(middle, middle + 1) == [True]
    assert torch.equal(packed_linear(x_TI, packed, None), expected)


@pytest.mark.parametrize("shape", [(0,), (3,), (1 << 19,), (1 << 20, 3)])
def test_memory_of_any_size_may_be_advised(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected = tensor.clone()
    advise_empty(tensor[1:])
    collapse_packed(tensor)
    assert torch.equal(tensor, expected)
