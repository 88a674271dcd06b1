"""A computation of C++ kernels that is recorded while it runs, and replayed without Python between its calls.

Owns the memory of the outputs. A call remembers addresses, so nothing that it reads or writes may move or be reused
elsewhere. Outputs come from an arena, which reuses memory as soon as its last view is gone. Replayed in order, the
calls reuse it in the same way. Only the library's calls are recorded. Anything that PyTorch itself would compute ends
the recording, because no replay would compute it. Must never import triton.
"""

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from blockyard.kernels.cpu.library import FUNCTIONS, Call, CpuLibrary
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = torch.ops.aten.empty.memory_format
_NEW_EMPTY = torch.ops.aten.new_empty.default
_EMPTY_LIKE = torch.ops.aten.empty_like.default


class NotRecordable(RuntimeError):
    """Raised if PyTorch, and not the library, would compute a part of a recording."""


class Arena:
    """Memory of recordings, of which one at a time is replayed. It never shrinks."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.num_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor. Its memory is free again when the last view of it is gone."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        size = 1 << max(6, (num_bytes - 1).bit_length())
        if not self._free[size]:
            self._free[size].append(torch.empty(size, dtype=torch.uint8))
            self.num_bytes += size
        memory = self._free[size].pop()
        lent = memory.numpy()  # PyTorch holds this array as long as any tensor lies in it
        weakref.finalize(lent, self._free[size].append, memory).atexit = False
        return torch.from_numpy(lent)[:num_bytes].view(dtype).view(tuple(shape))


class RecordingLibrary(CpuLibrary):
    """Runs each call of the library, and records it in `calls`."""

    def __init__(self, library: CpuLibrary) -> None:
        super().__init__(library.loaded)
        self.calls: list[tuple[int, bool, ctypes.Structure]] = []
        for name in FUNCTIONS:
            setattr(self, name, self._noting(getattr(self, name)))

    def _noting(self, function: Callable[..., None]) -> Callable[..., None]:
        address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
        assert address is not None

        def call(is_bf16: bool, threads: int, work: ctypes.Structure) -> None:
            self.calls.append((address, is_bf16, work))
            function(is_bf16, threads, work)

        return call


class Allocations(TorchDispatchMode):
    """A mode in which PyTorch may only allocate tensors, which lie in the arena, and make views.

    Raises NotRecordable for any other operation.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. This is PyTorch's own switch: with True the first call imports torch._dynamo, which costs each
        worker 1.4 s and 190 MB for nothing."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if func is _EMPTY:
            return self._arena.empty(args[0], dtype or torch.get_default_dtype())
        if func is _NEW_EMPTY:
            return self._arena.empty(args[1], dtype or args[0].dtype)
        if func is _EMPTY_LIKE:
            return self._arena.empty(args[0].shape, dtype or args[0].dtype)
        # By its schema reshape is a view even where it copies.
        result = func(*args, **kwargs) if func.is_view else None
        results = result if isinstance(result, list | tuple) else [result]
        memory = {_memory_of(arg) for arg in args} - {None}
        if all(_memory_of(part) in memory for part in results):
            return result
        raise NotRecordable(f"{func} is PyTorch's")


def _memory_of(value: object) -> int | None:
    """Return the address of a tensor's memory. Return None for anything else, and for a tensor in a layout of its own,
    such as a weight packed for oneDNN: it does not tell where it lies."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage().data_ptr()


class RecordedCalls:
    """The calls of a recording, to be replayed. Each replay writes its result to the same tensor."""

    def __init__(self, library: RecordingLibrary, arena: Arena, result: torch.Tensor) -> None:
        self.result = result
        self._library = library  # keeps its calls alive: `_calls` points into them
        self._arena = arena
        self._calls = (Call * len(library.calls))(
            *(
                Call(function=address, is_bf16=is_bf16, work=ctypes.addressof(work))
                for address, is_bf16, work in library.calls
            )
        )

    def replay(self) -> None:
        self._library.replay(torch.get_num_threads(), self._calls)
