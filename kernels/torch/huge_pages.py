"""Asks Linux to keep weights and KV pools in pages of 2 MiB, which need fewer address translations.

Owns the advice to the kernel alone. A refusal costs only speed. Does nothing on a GPU or on another system.

Measured on 2 virtual cores: linears of up to 32 rows 1.05-1.12x, attention over scattered blocks 1.1x.
"""

import ctypes
import sys

import torch

HUGE_PAGE_BYTES = 2 << 20
# From Linux's mman.h: advice for future pages, and for present pages since Linux 6.1.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def advise_empty(tensor: torch.Tensor) -> None:
    """Ask for huge pages for a tensor on a CPU. Call this before anything is written to the tensor."""
    if tensor.device.type == "cpu":
        _advise(tensor.data_ptr(), tensor.nbytes, collapse=False)


def collapse_packed(weight: torch.Tensor) -> None:
    """Copy the pages of a weight from `packed_linear.pack`, which is already in memory, into huge ones."""
    if weight.is_mkldnn:
        _advise(torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight), collapse=True)


def _advise(address: int, num_bytes: int, *, collapse: bool) -> None:
    begin = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if sys.platform != "linux" or begin >= end:
        return
    madvise = ctypes.CDLL(None).madvise
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE)[: 1 + collapse]:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
