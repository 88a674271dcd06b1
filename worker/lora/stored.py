"""Stored tensors: reads a safetensors file of an adapter, whose author is not trusted.

The header and the number of tensors are bounded before the header is parsed. The reader of the safetensors library
bounds neither: it holds Python's interpreter lock while it parses up to 100 MB, and every step of the worker waits
meanwhile. It also maps the file, and a mapped file that is cut ends the process. Here each tensor is read into memory
once its size is checked. Does not own which tensors an adapter has (peft.py).
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

import torch

MAX_HEADER_BYTES = 1 << 20
HEADER_BYTES_A_TENSOR = 512
"""Three times the usual entry of a header."""
HEADER_BYTES_OF_METADATA = 1 << 16
MAX_DIMENSIONS = 4
MAX_SIZE = 1 << 40
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


def open_regular(file: Path) -> FileIO:
    """Open a file for reading. Raises ValueError for what is no regular file: a FIFO or a device may never end."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    opened = FileIO(file, opener=opener)
    if stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        return opened
    opened.close()
    raise ValueError(f"{file.name} is no regular file")


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """Entry of a header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    """Bytes of the data, counted from the end of the header."""


class StoredTensors:
    """Tensors of an open file."""

    def __init__(self, file: FileIO, max_tensors: int) -> None:
        """Read the header, with `max_tensors` and one more at most. Raises ValueError for one that is none or large."""
        self._file = file
        file_bytes = os.fstat(file.fileno()).st_size
        most_bytes = min(MAX_HEADER_BYTES, HEADER_BYTES_OF_METADATA + HEADER_BYTES_A_TENSOR * max_tensors)
        header_bytes = int.from_bytes(self._bytes(min(_LENGTH_BYTES, file_bytes)), "little")
        self._data_at = _LENGTH_BYTES + header_bytes
        if self._data_at > file_bytes:
            raise ValueError("its header does not end in the file")
        if header_bytes > most_bytes:
            raise ValueError(f"its header has more than {most_bytes} bytes")
        self._data_bytes = file_bytes - self._data_at
        self.tensors = _parsed(bytes(self._bytes(header_bytes)), max_tensors + 1)

    def check_data(self) -> None:
        """Raise ValueError unless the tensors' data lie one behind the other and fill the file."""
        at = 0
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.begin):
            num_bytes = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
            if (tensor.begin, tensor.end) != (at, at + num_bytes):
                raise ValueError("its data do not lie as its header says")
            at = tensor.end
        if at != self._data_bytes:
            raise ValueError("its data do not end where the file does")

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor. Raises ValueError for a file that was cut meanwhile."""
        tensor = self.tensors[name]
        self._file.seek(self._data_at + tensor.begin)
        data = self._bytes(tensor.end - tensor.begin)
        return torch.frombuffer(data, dtype=DTYPES[tensor.dtype]).reshape(tensor.shape)

    def _bytes(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        left = memoryview(data)
        while left:
            if not (num_read := self._file.readinto(left)):
                raise ValueError("it was cut while it was read")
            left = left[num_read:]
        return data


def _parsed(header: bytes, max_tensors: int) -> Mapping[str, AdapterTensor]:
    try:
        entries = json.loads(header)
        entries.pop(_METADATA, None)
        return {name: _entry(entry) for name, entry in islice(entries.items(), max_tensors)}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise ValueError("its header is none") from None


def _entry(entry: Any) -> AdapterTensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape[: MAX_DIMENSIONS + 1], begin, end)
    if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n < MAX_SIZE for n in numbers):
        raise TypeError("no entry of a tensor")
    return AdapterTensor(dtype, shape, begin, end)
